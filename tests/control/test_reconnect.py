"""Clients that lose their connection, or are stopped, in the middle of their streams: no token is lost, repeated or
changed, and no request runs twice."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from evenflow.control import client_state, sessions
from evenflow.control.client import AsyncClient
from loop_server import LoopServer, expected

STREAMS = 4
TOKENS = 400


class Proxy:
    """Stands between client and server on TCP; can cut its connections, or swallow what is sent over them."""

    def __init__(self, endpoint: str) -> None:
        self._port = int(endpoint.rpartition(":")[2])
        self._writers: list[asyncio.StreamWriter] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.dialled = 0

    async def __aenter__(self) -> "Proxy":
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.endpoint = f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()
        self.cut()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Every connection is reset; what is under way on it is lost."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def swallow(self) -> None:
        """The connections stay, but nothing comes through any more: as when a cable is pulled."""
        for task in self._tasks:
            task.cancel()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.dialled += 1
        there, back = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, back]
        for source, sink in ((reader, back), (there, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(4096):
                sink.write(data)
                await sink.drain()
        except OSError:
            pass
        sink.close()


async def stream_all(client: AsyncClient, disturb: Callable[[int], Awaitable[None]]) -> None:
    """Some streams at once, ``disturb`` called after each token of the first; all must be exact."""

    async def one(number: int) -> None:
        prompt = 5 + 40 * number
        stream = await client.submit(range(1, prompt + 1), max_tokens=TOKENS)
        ids: list[int] = []
        async for chunk in stream:
            ids += chunk.ids
            if number == 0:
                await disturb(len(ids))
        assert ids == expected(prompt, TOKENS)
        assert stream.finish is not None and stream.finish.reason == "length"
        assert stream.finish.output_tokens == TOKENS

    async with asyncio.timeout(120):
        await asyncio.gather(*(one(number) for number in range(STREAMS)))


def test_a_connection_that_is_cut_again_and_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client sees the end of its connection by itself: here it neither pings nor waits for a limit."""
    for module, name in ((client_state, "SILENCE_S"), (client_state, "INTERVAL_S"), (sessions, "SILENCE_S")):
        monkeypatch.setattr(module, name, 1000.0)

    async def main() -> None:
        async with LoopServer(str(tmp_path), tcp=True, pace=0.01) as control:
            taken = control.submissions()
            async with Proxy(control.endpoint) as proxy, AsyncClient(proxy.endpoint) as client:
                cuts = iter([3, 150, 151, TOKENS - 1])
                next_cut = next(cuts)

                async def disturb(count: int) -> None:
                    nonlocal next_cut
                    if count >= next_cut:
                        next_cut = next(cuts, 10**9)
                        proxy.cut()
                        # Slow until most cuts are made, so that they find something to cut on a busy machine too.
                        control.pace = 0.01 if next_cut < TOKENS - 1 else 0.001

                await stream_all(client, disturb)
                assert proxy.dialled >= 3
                continued = [submit for submit in taken if len(submit.tokens) // 4 > submit.prompt_len]
                assert len(continued) >= STREAMS, "what was received is not asked for again"
                await control.until(lambda: control.values()["clients"] == 1 and not control.unfinished)
                assert control.values()["kv_blocks_used"] == 0

    asyncio.run(main())


def test_a_connection_that_falls_silent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody is told of it. The client dials again after its limit; by the secret it names, the server knows that the
    old connection, which looks as good as ever, is over."""
    monkeypatch.setattr(client_state, "SILENCE_S", 1.5)

    async def main() -> None:
        served = LoopServer(str(tmp_path), tcp=True, pace=0.01)
        async with served as control, Proxy(control.endpoint) as proxy, AsyncClient(proxy.endpoint) as client:
            done = False

            async def disturb(count: int) -> None:
                nonlocal done
                if count >= 100 and not done:
                    done = True
                    control.gate.clear()
                    proxy.swallow()
                    await control.until(lambda: control.values()["requests_total"] == 2 * STREAMS)
                    assert control.values()["clients"] == 1 and proxy.dialled == 2
                    assert control.unfinished == STREAMS, "none of them runs twice"
                    control.gate.set()
                    control.pace = 0.001

            await stream_all(client, disturb)
            values = control.values()
            assert values["clients_cut_silent_total"] == values["clients_cut_slow_total"] == 0

    asyncio.run(main())


CHILD = """
import asyncio, json, sys
from evenflow.control.client import AsyncClient

async def one(client, prompt, tokens):
    stream = await client.submit(range(1, prompt + 1), max_tokens=tokens)
    ids = []
    async for chunk in stream:
        if not ids:
            print("first", flush=True)
        ids += chunk.ids
    return [prompt, ids, stream.finish.reason]

async def main():
    async with AsyncClient(sys.argv[1], name="child") as client:
        print(json.dumps(await asyncio.gather(*(one(client, 5 + 40 * n, 600) for n in range(4)))), flush=True)

asyncio.run(main())
"""


@pytest.mark.parametrize("limit", [10.0, 0.5], ids=["shorter than the limit", "longer than the limit"])
def test_a_client_that_is_stopped_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: float) -> None:
    """kill -STOP in the middle of four streams, then -CONT: past the server's limit its session is over by then, and
    it submits what is unfinished anew; within it, nothing happens but that the tokens come late."""
    monkeypatch.setattr(sessions, "SILENCE_S", limit)

    async def main() -> None:
        async with LoopServer(str(tmp_path), pace=0.05) as control:
            taken = control.submissions()
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", CHILD, control.endpoint), stdout=asyncio.subprocess.PIPE
            )
            assert child.stdout is not None
            # Until the first token its pings may be too late for the short limit: it then comes back by itself.
            assert (await asyncio.wait_for(child.stdout.readline(), 120)) == b"first\n"
            os.kill(child.pid, signal.SIGSTOP)
            control.pace = 0.002
            if limit < 1:
                await control.until(lambda: control.values()["clients"] == 0 and not control.unfinished)
            else:
                had = control.values()["iterations_total"]
                await control.until(lambda: control.values()["iterations_total"] > had + 100)
            os.kill(child.pid, signal.SIGCONT)
            if limit < 1:
                # Its pings come once a second.
                monkeypatch.setattr(sessions, "SILENCE_S", 10.0)
            out, _ = await asyncio.wait_for(child.communicate(), 120)
            for prompt, ids, reason in json.loads(out.splitlines()[-1]):
                assert ids == expected(prompt, 600) and reason == "length"
            assert (len(taken) > STREAMS) == (limit < 1)

    asyncio.run(main())
