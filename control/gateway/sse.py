"""Server-sent events: an ASGI response that writes events as they are made, and notices when nobody listens.

A client that goes away is seen by ``receive``; what produces the events is then cancelled, which aborts its requests.
After some seconds of silence a comment is sent, so that proxies do not take a waiting stream for a dead one.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from .limits import KEEP_ALIVE_SECONDS

T = TypeVar("T")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
DONE = b"[DONE]"


class ClientGone(Exception):
    """The HTTP client disconnected."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of ``work``, which is cancelled when the client disconnects. Raises ``ClientGone`` then."""
    task = asyncio.ensure_future(work)
    watch = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watch}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        for other in (task, watch):
            other.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while True:
        message: Message = await receive()
        if message["type"] == "http.disconnect":
            return


class EventWriter:
    """Writes the events of one response."""

    __slots__ = ("_loop", "_send", "_silent_since", "_timer")

    def __init__(self, send: Send) -> None:
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._silent_since = self._loop.time()
        self._timer: asyncio.TimerHandle | None = None

    async def start(self) -> None:
        await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        self._arm(KEEP_ALIVE_SECONDS)

    async def event(self, data: bytes) -> None:
        await self._write(b"data: " + data + b"\n\n")

    async def end(self) -> None:
        self.close()
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    async def _write(self, body: bytes) -> None:
        self._silent_since = self._loop.time()
        await self._send({"type": "http.response.body", "body": body, "more_body": True})

    def _arm(self, delay: float) -> None:
        self._timer = self._loop.call_later(delay, self._on_timer)

    def _on_timer(self) -> None:
        silence = self._loop.time() - self._silent_since
        if silence >= KEEP_ALIVE_SECONDS:
            # A slow client's writes wait in line; a comment joins the end of it.
            self._loop.create_task(self._write(b": keep-alive\n\n"))
            silence = 0.0
        self._arm(KEEP_ALIVE_SECONDS - silence)


Producer = Callable[[EventWriter], Awaitable[None]]


class EventResponse(Response):
    """Runs ``produce`` with a writer, and ``closed`` at the end, whatever happened before."""

    def __init__(self, produce: Producer, closed: Callable[[], None]) -> None:
        super().__init__()
        self._produce = produce
        self._closed = closed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = EventWriter(send)
        try:
            await while_connected(receive, self._run(writer))
        except ClientGone:
            pass
        finally:
            writer.close()
            self._closed()

    async def _run(self, writer: EventWriter) -> None:
        await writer.start()
        await self._produce(writer)
        await writer.end()
