"""A server that emits exactly one token every so often, whatever else happens, and harms streams where it is told to.

Plain asyncio streams in a thread with a loop of its own. The answers' form is OpenAI's completions.
"""

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

TOKEN_SECONDS = 0.02


@dataclass
class Manners:
    """How the server behaves. ``statuses`` and ``cuts`` are taken in turns by the requests for work."""

    #: Tokens in a chunk.
    batch: int = 1
    #: Usage in each chunk, if the client asks for it.
    usage: bool = True
    #: An HTTP status other than 200 for every nth request; after how many tokens every nth stream is cut.
    status: int = 200
    every: int = 0
    cut_after: int = 0
    #: Fields that are refused with 400.
    refuses: tuple[str, ...] = ()
    #: Bodies of the requests, and how many streams were open at once.
    bodies: list[dict] = field(default_factory=list)
    open: int = 0
    most_open: int = 0
    tokens: int = 0


class SteadyServer:
    def __init__(self, manners: Manners) -> None:
        self.manners = manners
        self.url = ""
        self._loop = asyncio.new_event_loop()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        assert self._started.wait(30)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(30)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        with contextlib.closing(self._loop):
            self._loop.run_until_complete(self._serve())

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task] = set()
        server = await asyncio.start_server(self._client, "127.0.0.1", 0, backlog=1024)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._started.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while await self._answer(reader, writer):
                pass
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self._tasks.discard(task)
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        """One request. Returns whether the connection lives on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split("\r\n")[0] or 0)
        body = await reader.readexactly(length)
        if " /v1/models " in head:
            _whole(writer, 200, {"data": [{"id": "steady"}]})
            return True
        if " /v1/completions " not in head:
            _whole(writer, 404, {"error": {"message": "no such path"}})
            return True
        return await self._complete(json.loads(body), writer)

    async def _complete(self, body: dict, writer: asyncio.StreamWriter) -> bool:
        manners = self.manners
        if refused := [name for name in manners.refuses if name in json.dumps(body)]:
            _whole(writer, 400, {"error": {"message": f"unknown field {refused[0]}"}})
            return True
        # The client's first look, of 2 tokens, is not harmed.
        if body["max_tokens"] > 2:
            manners.bodies.append(body)
        harmed = manners.every > 0 and body["max_tokens"] > 2 and len(manners.bodies) % manners.every == 0
        if harmed and manners.status != 200:
            _whole(writer, manners.status, {"error": {"message": "told to fail"}})
            return True
        manners.open += 1
        manners.most_open = max(manners.open, manners.most_open)
        try:
            await self._stream(body, writer, manners.cut_after if harmed else 0)
        finally:
            manners.open -= 1
        return False

    async def _stream(self, body: dict, writer: asyncio.StreamWriter, cut_after: int) -> None:
        manners, loop = self.manners, asyncio.get_running_loop()
        every = manners.usage and body.get("stream_options", {}).get("continuous_usage_stats")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        begin, sent, total = loop.time(), 0, body["max_tokens"]
        while sent < total:
            sent = min(sent + manners.batch, total)
            await asyncio.sleep(begin + sent * TOKEN_SECONDS - loop.time())
            choice = {"index": 0, "text": "x" * manners.batch, "finish_reason": "length" if sent == total else None}
            usage = {"prompt_tokens": 7, "completion_tokens": sent} if every else None
            _event(writer, json.dumps({"choices": [choice], "usage": usage}))
            manners.tokens += manners.batch
            if cut_after and sent >= cut_after:
                writer.transport.abort()
                return
        if body.get("stream_options"):
            _event(writer, json.dumps({"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": total}}))
        _event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")
        await writer.drain()


def _event(writer: asyncio.StreamWriter, data: str) -> None:
    event = f"data: {data}\n\n".encode()
    writer.write(b"%x\r\n%b\r\n" % (len(event), event))


def _whole(writer: asyncio.StreamWriter, status: int, answer: dict) -> None:
    body = json.dumps(answer).encode()
    writer.write(b"HTTP/1.1 %d x\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body))


@contextlib.contextmanager
def steady(manners: Manners) -> Iterator[SteadyServer]:
    server = SteadyServer(manners)
    try:
        yield server
    finally:
        server.close()
