"""One streamed request over a connection of its own: sent, read as it comes, timed.

A protocol right on the socket, with the C parsers of HTTP and JSON: some twenty microseconds a chunk, so that the
client is not what is measured. Tokens are counted by the usage in each chunk where the server sends that; a chunk
that brings k tokens is one gap and k-1 gaps of nothing. Otherwise a chunk with text counts as one token.
"""

import asyncio
import ssl
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httptools
import msgspec

#: Bytes read at once, by all connections into the same memory: each read is consumed before the next.
_BUFFER = memoryview(bytearray(1 << 16))
#: Bytes of an error's body that are kept.
_ERROR_BYTES = 2000
#: Longest line of a stream, in bytes: what is longer is no server-sent event.
_LINE_BYTES = 1 << 24


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go. ``address``: what ``host`` resolved to; ``head``: a request's head, but for its length."""

    address: str
    port: int
    head: bytes
    tls: ssl.SSLContext | None = None
    host: str = ""


@dataclass(slots=True)
class Outcome:
    """What became of one request. Times are the loop's, in seconds; lengths in tokens.

    ``failure`` is its kind, empty if the stream ended well; ``detail`` what the server said.
    """

    index: int
    #: When it should have started, when it did, and when its connection stood. None: not (yet).
    due: float | None
    started: float
    connected: float | None = None
    first: float | None = None
    last: float | None = None
    ended: float | None = None
    #: Seconds before each token but the first, and how late each read may have been noticed.
    gaps: "array[float]" = field(default_factory=lambda: array("d"))
    late: "array[float]" = field(default_factory=lambda: array("d"))
    chunks: int = 0
    tokens: int = 0
    #: By the server's usage, 0 if it does not say.
    prompt_tokens: int = 0
    #: Tokens were counted by the usage in each chunk.
    exact: bool = False
    failure: str = ""
    detail: str = ""
    #: Was cut off by the end of the run.
    unfinished: bool = False


class _Delta(msgspec.Struct, gc=False):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, gc=False):
    text: str | None = None
    delta: _Delta | None = None
    finish_reason: str | None = None


class _Usage(msgspec.Struct, gc=False):
    prompt_tokens: int = 0
    completion_tokens: int | None = None


class _Chunk(msgspec.Struct, gc=False):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_decode = msgspec.json.Decoder(_Chunk).decode


def _has_text(choice: _Choice) -> bool:
    if choice.text:
        return True
    delta = choice.delta
    return delta is not None and bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)


class Exchange(asyncio.BufferedProtocol):
    """One request and its streamed answer. ``done`` is resolved when nothing more will come.

    ``clock`` gives when the loop woke, and by how much it may have been late.
    """

    def __init__(self, outcome: Outcome, request: bytes, clock: Callable[[], tuple[float, float]]) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._outcome = outcome
        self._request = request
        self._clock = clock
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._rest = b""
        self._now = 0.0
        self._status = 0
        #: The server said that this was all: ``[DONE]``, or a finish reason.
        self._complete = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._outcome.connected = asyncio.get_running_loop().time()
        transport.write(self._request)
        self._request = b""

    def get_buffer(self, sizehint: int) -> memoryview:
        return _BUFFER

    def buffer_updated(self, nbytes: int) -> None:
        self._now, late = self._clock()
        self._outcome.late.append(late)
        try:
            self._parser.feed_data(_BUFFER[:nbytes])
        except (httptools.HttpParserError, msgspec.DecodeError, ValueError) as error:
            self._fail("bad answer", str(error.__context__ or error))
            self._end()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            if self._outcome.failure == "" and self._status == 0:
                self._fail("connection closed", str(exc or "before an answer"))
            self._end()

    # What the parser calls.

    def on_headers_complete(self) -> None:
        self._status = self._parser.get_status_code()

    def on_body(self, body: bytes) -> None:
        data = self._rest + body if self._rest else body
        if self._status != 200:
            self._rest = data[:_ERROR_BYTES]
            return
        lines = data.split(b"\n")
        self._rest = lines.pop()
        if len(self._rest) > _LINE_BYTES:
            raise ValueError("a line without end")
        for line in lines:
            if line.startswith(b"data:"):
                self._event(line[5:].strip())

    def on_message_complete(self) -> None:
        if self._status >= 200:
            self._end()

    def _event(self, data: bytes) -> None:
        if data == b"[DONE]":
            self._complete = True
            return
        chunk = _decode(data)
        if chunk.error is not None:
            self._fail("error in the stream", _message(data))
            return
        outcome, usage = self._outcome, chunk.usage
        total = None if usage is None else usage.completion_tokens
        if usage is not None:
            outcome.prompt_tokens = usage.prompt_tokens
        if total is not None and chunk.choices and (outcome.exact or outcome.chunks == 0):
            outcome.exact = True
            self._tokens(total - outcome.tokens)
        else:
            self._tokens(int(any(_has_text(choice) for choice in chunk.choices)))
            # A total at the end: chunks were counted until here, and it is right.
            outcome.tokens = max(outcome.tokens, total or 0)
        if any(choice.finish_reason for choice in chunk.choices):
            self._complete = True

    def _tokens(self, new: int) -> None:
        if new < 1:
            return
        outcome, now = self._outcome, self._now
        outcome.chunks += 1
        outcome.tokens += new
        if outcome.last is None:
            outcome.first = now
        else:
            outcome.gaps.append(now - outcome.last)
        outcome.last = now
        for _ in range(new - 1):
            outcome.gaps.append(0.0)

    def _fail(self, kind: str, detail: str) -> None:
        if not self._outcome.failure:
            self._outcome.failure, self._outcome.detail = kind, detail

    def _end(self) -> None:
        """The answer is over, well or not."""
        if self.done.done():
            return
        if self._status != 200 and not self._outcome.failure:
            self._fail(f"HTTP {self._status}", _message(self._rest))
        elif not self._complete:
            self._fail("cut stream", f"after {self._outcome.tokens} tokens")
        elif self._outcome.first is None:
            self._fail("no token", "the stream ended without one")
        self._outcome.ended = self._now or asyncio.get_running_loop().time()
        self.done.set_result(None)
        if self._transport is not None:
            self._transport.close()


class _Error(msgspec.Struct):
    message: str


class _ErrorBody(msgspec.Struct):
    error: _Error


def _message(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message[:300]
    except msgspec.DecodeError:
        return body.decode(errors="replace").strip()[:300]


async def exchange(
    target: Target, body: bytes, outcome: Outcome, clock: Callable[[], tuple[float, float]], timeout: float
) -> None:
    """Send ``body`` and fill ``outcome``, whatever happens; only a cancellation comes through."""
    loop = asyncio.get_running_loop()
    request = b"%bx-request-id: bench-%d-%x\r\ncontent-length: %d\r\n\r\n%b" % (
        target.head,
        outcome.index,
        int(outcome.started * 1e6),
        len(body),
        body,
    )
    transport: asyncio.Transport | None = None
    try:
        async with asyncio.timeout(timeout):
            transport, protocol = await loop.create_connection(
                lambda: Exchange(outcome, request, clock),
                target.address,
                target.port,
                ssl=target.tls,
                server_hostname=target.host if target.tls is not None else None,
            )
            await protocol.done
    except TimeoutError:
        outcome.failure, outcome.detail = "timeout", f"not done after {timeout:g} s"
    except OSError as error:
        refused = isinstance(error, ConnectionRefusedError)
        outcome.failure = "connection refused" if refused else "connection failed"
        outcome.detail = str(error)
    finally:
        if outcome.ended is None:
            outcome.ended = loop.time()
        if transport is not None:
            # At once, whatever is still to be written.
            transport.abort()
