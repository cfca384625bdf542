"""The asynchronous client: a socket, a timer and streams around ``ClientState``. Works under asyncio and uvloop.

The hot path has no futures but those of readers that wait: the socket's descriptor is watched by the event loop, and
one message is handed out to all its streams at once.
"""

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import zmq
from msgspec.structs import replace

from .client_state import ClientState, Finish, Request, pack_ids
from .token_logprobs import TokenLogprob
from .wire import Sampling, StatusReply, Welcome, WireError, decode_to_client, encode
from .wire.client import GREEDY
from .wire.dialling import Dialling, dial_followed
from .wire.keys import dial_keys
from .wire.sockets import CLIENT_HWM, Socket, WireContext, close_context, new_context

#: How often time alone is looked at.
_TIMER_S = 0.25
#: A full pipe (the control process is down or slow) is tried again after this long.
_BLOCKED_S = 0.05
#: A server that refused the key may have learnt of it since.
_REFUSED_S = 2.0
#: Messages taken from the socket before other work of the event loop gets its turn.
_BURST = 64


class ClientClosed(RuntimeError):
    """The client was closed, or never opened."""


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens that came since the last chunk, at least one, and their log-probabilities, if those were asked for."""

    ids: list[int]
    logprobs: Sequence[TokenLogprob] = ()


def draw_seed() -> int:
    """A fresh seed, 63 bits: every encoder and decoder of MessagePack takes it as a signed integer."""
    return secrets.randbits(63)


class Stream:
    """The tokens of one request as they come. Iteration ends when ``finish`` is set, whatever its reason."""

    __slots__ = ("_client", "_cursor", "_read", "_request", "_waiter")

    def __init__(self, client: "AsyncClient", request: Request) -> None:
        self._client = client
        self._request = request
        self._cursor = 0
        self._read = 0
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finish(self) -> Finish | None:
        """How the request ended, or None while it has not."""
        return self._request.finish

    @property
    def received(self) -> int:
        """Tokens that have come so far."""
        return len(self._request.received)

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens that were found in the prefix cache, as far as the control process has said."""
        return self._request.cached_tokens

    @property
    def request(self) -> str:
        return self._request.name

    def take(self) -> list[int]:
        """The tokens that are here and were not taken before, without waiting."""
        ids = self._request.received[self._cursor :].tolist()
        self._cursor += len(ids)
        return ids

    def take_logprobs(self) -> list[TokenLogprob]:
        """Those of the tokens taken since the last call, if they were asked for: as many as those tokens."""
        columns = self._request.logprobs
        if columns is None:
            return []
        start, self._read = self._read, self._cursor
        return columns.read(self._request.received[start : self._cursor], start)

    @property
    def prompt_logprobs(self) -> list[TokenLogprob]:
        """Those of the prompt's tokens from the second on, if they were asked for. Complete with the first token."""
        columns = self._request.prompt_logprobs
        if columns is None:
            return []
        return columns.read(memoryview(self._request.prompt)[4:].cast("I"), 0)

    async def wait(self) -> bool:
        """Wait for news. True if there are tokens to take, False if the request ended and all were taken."""
        request = self._request
        while self._cursor >= len(request.received):
            if request.finish is not None:
                return False
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def abort(self) -> None:
        """End the request if it has not ended. Idempotent."""
        self._client._abort(self._request)

    async def confirmed(self, timeout: float) -> None:
        """After an abort: wait until the control process has said what it cached. Raises ``TimeoutError``."""
        if self._request.unconfirmed:
            await self._client.wait_for(lambda: not self._request.unconfirmed, timeout)

    async def aclose(self) -> None:
        """The same, as asynchronous clean-up expects it."""
        self.abort()

    def __aiter__(self) -> AsyncIterator[Chunk]:
        return self

    async def __anext__(self) -> Chunk:
        if not await self.wait():
            raise StopAsyncIteration
        return Chunk(self.take(), self.take_logprobs())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class AsyncClient:
    """A connection to the control process. All methods belong to the event loop in which it was opened.

    ``keys``: the folder with ``server.pub`` and ``client.key``, for a ``tcp://`` endpoint.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        name: str = "python",
        context: WireContext | None = None,
        keys: str | os.PathLike[str] | None = None,
    ) -> None:
        self.endpoint = endpoint
        self._keys = None if keys is None else dial_keys(keys, "client")
        self._state = ClientState(name)
        self._own_context = context is None
        self._context = context
        self._socket: Socket | None = None
        self._dialling: Dialling | None = None
        self._redial_at = 0.0
        self._connection = -1
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._pump_handle: asyncio.Handle | None = None
        self._streams: dict[int, Stream] = {}
        self._status_waiters: dict[int, asyncio.Future[StatusReply]] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._nonce = 0
        #: Frames from the control process that did not decode.
        self.bad_frames = 0

    @property
    def welcome(self) -> Welcome | None:
        """The service's last word on its limits and readiness; None before the first."""
        return self._state.welcome

    @property
    def last_status(self) -> StatusReply | None:
        """The newest status reply, as renewed by ``subscribe``."""
        return self._state.status

    @property
    def connected(self) -> bool:
        """The control process was heard of in the last three seconds and knows this client."""
        return self._state.connected

    async def open(self) -> None:
        """Connect. Returns at once; ``wait_connected`` waits for an answer. Raises ``OSError`` for a bad endpoint."""
        self._loop = asyncio.get_running_loop()
        if self._context is None:
            self._context = new_context()
        self._state.start(self._loop.time())
        try:
            self._turn()
        except BaseException:
            await self.close()
            raise
        self._timer = self._loop.call_later(_TIMER_S, self._on_timer)

    async def close(self) -> None:
        """Disconnect; unfinished streams end with the code ``closed``. Idempotent."""
        if self._loop is None:
            return
        self._state.fail_all("the client was closed", "closed")
        self._hand_out()
        for waiter in [*self._status_waiters.values(), *self._waiters]:
            if not waiter.done():
                waiter.set_exception(ClientClosed("the client was closed"))
        if self._timer is not None:
            self._timer.cancel()
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._drop_socket()
        self._loop = None
        if self._own_context and self._context is not None:
            close_context(self._context)
            self._context = None

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def wait_for(self, condition: Callable[[], bool], timeout: float | None = None) -> None:
        """Wait until ``condition`` holds; it is looked at after every message. Raises ``TimeoutError``."""
        loop = self._open_loop()
        try:
            async with asyncio.timeout(timeout):
                while not condition():
                    waiter = loop.create_future()
                    self._waiters.append(waiter)
                    try:
                        await waiter
                    finally:
                        if waiter in self._waiters:
                            self._waiters.remove(waiter)
        except TimeoutError:
            raise TimeoutError(self._state.problem or self._unconnected()) from None

    def _unconnected(self) -> str:
        if self._dialling is not None:
            self._dialling.look()
            if self._dialling.problem is not None:
                return self._dialling.problem
        return f"no answer from {self.endpoint}"

    async def wait_connected(self, timeout: float | None = None) -> Welcome:
        """Wait until the control process has answered. Raises ``TimeoutError``, which says what is known."""
        await self.wait_for(lambda: self._state.connected, timeout)
        welcome = self._state.welcome
        assert welcome is not None
        return welcome

    async def submit(
        self,
        tokens: Sequence[int],
        *,
        max_tokens: int = 0,
        sampling: Sampling = GREEDY,
        stop_ids: Sequence[int] = (),
        min_tokens: int = 0,
        salt: bytes = b"",
        request: str = "",
        leader: Stream | None = None,
        tenant: str = "",
        priority: int = 0,
        deadline_ms: int = 0,
        slo: str | int = "",
    ) -> Stream:
        """Ask for a completion. Without a connection the request waits for one; it is never lost.

        ``sampling.seed`` 0 with a temperature means "draw one", so that a restart repeats the same draws. ``leader``
        is a stream of the same prompt, whose computed blocks this request shares once they are there. A request that
        has not ended ``deadline_ms`` from now is ended, with the reason ``deadline``; 0 is no deadline. ``tenant``
        and ``priority`` (smaller is more urgent) matter to the admission orders ``fair`` and ``priority``. ``slo`` is
        the class of the time between tokens, or a target in milliseconds.
        """
        loop = self._open_loop()
        if sampling.temperature > 0 and sampling.seed == 0:
            sampling = replace(sampling, seed=draw_seed())
        record = self._state.submit(
            pack_ids(tokens),
            name=request or f"py-{secrets.token_hex(6)}",
            max_tokens=max_tokens,
            sampling=sampling,
            stop_ids=tuple(stop_ids),
            min_tokens=min_tokens,
            salt=salt,
            leader=None if leader is None else leader._request,
            tenant=tenant,
            priority=priority,
            deadline_ms=deadline_ms,
            slo=slo,
            now=loop.time(),
        )
        stream = Stream(self, record)
        self._streams[record.key] = stream
        self._turn()
        return stream

    async def abort(self, stream: Stream) -> None:
        """End a stream's request. Idempotent, also after its end."""
        stream.abort()

    async def status(self, timeout: float = 5.0, rows: int = 0) -> StatusReply:
        """Ask for the service's counters, and at most ``rows`` unfinished requests. Raises ``TimeoutError``."""
        loop = self._open_loop()
        async with asyncio.timeout(timeout):
            await self.wait_connected()
            self._nonce += 1
            nonce = self._nonce
            waiter: asyncio.Future[StatusReply] = loop.create_future()
            self._status_waiters[nonce] = waiter
            self._state.ask_status(nonce, rows)
            self._turn()
            try:
                return await waiter
            finally:
                self._status_waiters.pop(nonce, None)

    def subscribe(self, interval_ms: int = 1000, rows: int = 0) -> None:
        """Keep ``last_status`` fresh, with at most ``rows`` of the unfinished requests; 0 milliseconds end it."""
        self._state.subscribe(interval_ms, rows)
        self._turn()

    def fail_all(self, message: str, code: str) -> None:
        """End all streams from this side, with an error."""
        self._state.fail_all(message, code)
        self._turn()

    def _abort(self, request: Request) -> None:
        if request.finish is None and self._loop is not None:
            self._state.abort(request)
            self._turn()

    def _open_loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise ClientClosed("the client is not open")
        return self._loop

    def _on_timer(self) -> None:
        loop = self._loop
        if loop is None:
            return
        # What already lies in the socket counts before silence, or the end of the connection, is judged.
        more = self._receive()
        if self._dialling is not None:
            self._dialling.look()
            if self._dialling.losses and not more:
                self._dialling.losses = 0
                self._state.disconnected(loop.time())
            if self._dialling.refused and loop.time() >= self._redial_at:
                self._drop_socket()
                self._dial()
        self._state.on_timer(loop.time())
        self._timer = loop.call_later(_TIMER_S, self._on_timer)
        self._turn()

    def _turn(self) -> None:
        """Send what is due, take what has come, wake who waits.

        The descriptor only signals changes, and sending may swallow one: so every send is followed by a look
        for messages.
        """
        loop = self._loop
        if loop is None:
            return
        self._pump_handle = None
        more = True
        for _ in range(4):
            sent = self._send()
            more = self._receive()
            if not more and (not sent or not self._state.outbox):
                break
        self._hand_out()
        if self._state.outbox:
            self._schedule(loop, _BLOCKED_S)
        elif more:
            self._schedule(loop, 0)

    def _schedule(self, loop: asyncio.AbstractEventLoop, delay: float) -> None:
        if self._pump_handle is not None:
            self._pump_handle.cancel()
        self._pump_handle = loop.call_later(delay, self._turn) if delay else loop.call_soon(self._turn)

    def _send(self) -> bool:
        state = self._state
        if state.connection != self._connection:
            self._drop_socket()
            self._dial()
        socket = self._socket
        assert socket is not None
        count = 0
        try:
            for message in state.outbox:
                socket.send(encode(message), zmq.DONTWAIT)
                count += 1
        except zmq.Again:
            pass
        del state.outbox[:count]
        return count > 0

    def _receive(self) -> bool:
        """Take in what lies in the socket, a burst at most. True if there may be more."""
        socket, loop, state = self._socket, self._loop, self._state
        if socket is None or loop is None:
            return False
        for _ in range(_BURST):
            if state.connection != self._connection:
                return True
            try:
                frame = socket.recv(zmq.DONTWAIT)
            except zmq.Again:
                return False
            try:
                message = decode_to_client(frame)
            except WireError:
                self.bad_frames += 1
                continue
            state.receive(message, loop.time())
        return True

    def _hand_out(self) -> None:
        state = self._state
        for request in state.touched:
            request.touched = False
            stream = self._streams.get(request.key)
            if request.finish is not None:
                self._streams.pop(request.key, None)
            if stream is not None:
                stream._wake()
        state.touched.clear()
        for reply in state.replies:
            waiter = self._status_waiters.get(reply.nonce)
            if waiter is not None and not waiter.done():
                waiter.set_result(reply)
        state.replies.clear()
        if self._waiters:
            for waiter in self._waiters:
                if not waiter.done():
                    waiter.set_result(None)
            self._waiters.clear()

    def _dial(self) -> None:
        assert self._context is not None and self._loop is not None
        self._socket, self._dialling = dial_followed(
            self._context, self.endpoint, receive_hwm=CLIENT_HWM, keys=self._keys
        )
        self._redial_at = self._loop.time() + _REFUSED_S
        self._connection = self._state.connection
        self._loop.add_reader(self._socket.fileno(), self._turn)

    def _drop_socket(self) -> None:
        if self._socket is None:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
        if self._dialling is not None:
            self._dialling.close()
            self._dialling = None
        self._socket.close(0)
        self._socket = None
