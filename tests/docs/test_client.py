"""The client of the documents, in at most 40 lines, against the real control process: its output equals the Python
client's, whatever form the tokens come in."""

import ast
import asyncio
import importlib.util
import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from evenflow.control.client import AsyncClient
from evenflow.control.wire import Merged, Tick, Welcome, decode_to_client
from loop_server import LoopServer

PROGRAM = Path(__file__).parents[2] / "docs" / "client.py"
PROMPTS = [list(range(1, 6)), list(range(1, 60)), [7]]


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("minimal_client", PROGRAM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


async def reference(endpoint: str, prompts: list[list[int]], count: int) -> list[list[int]]:
    async with AsyncClient(endpoint) as client:
        streams = [await client.submit(prompt, max_tokens=count) for prompt in prompts]
        return [[token async for chunk in stream for token in chunk.ids] for stream in streams]


def forms(control: LoopServer) -> dict[str, int]:
    """How the control process has told its tokens, counted from now on."""
    counts = {"dense": 0, "sparse": 0, "merged": 0}
    send = control.control.delivery._send

    def note(identity: bytes, frames: list[bytes]):
        sent = send(identity, frames)
        (frame,) = frames
        message = decode_to_client(frame)
        if sent == "sent" and isinstance(message, Tick) and message.ids:
            counts["dense" if message.dense else "sparse"] += 1
        counts["merged"] += sent == "sent" and isinstance(message, Merged)
        return sent

    control.control.delivery._send = note
    return counts


def test_it_has_at_most_40_lines_and_needs_pyzmq_and_msgpack_only() -> None:
    text = PROGRAM.read_text()
    assert sum(bool(line.strip()) for line in text.splitlines()) <= 40
    imports = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports}
    assert names == {"array", "msgpack", "zmq"}


def test_dense_and_sparse_ticks(tmp_path: Path) -> None:
    async def main() -> None:
        async with LoopServer(str(tmp_path)) as control:
            counts = forms(control)
            complete = load().complete
            control.gate.clear()
            mine = asyncio.create_task(asyncio.to_thread(complete, control.endpoint, PROMPTS, 300))
            other = asyncio.create_task(reference(control.endpoint, PROMPTS, 300))
            await control.until(lambda: control.unfinished == 2 * len(PROMPTS))
            control.gate.set()
            got, theirs = await mine, await other
            assert got == theirs and [len(ids) for ids in got] == [300] * 3
            assert counts["sparse"] > 0, "two clients share iterations"
            counts["dense"] = 0
            assert await asyncio.to_thread(complete, control.endpoint, PROMPTS, 40) == [ids[:40] for ids in theirs]
            assert counts["dense"] > 0, "it was alone"

    asyncio.run(main())


def test_merged_ticks_and_a_lost_session(tmp_path: Path) -> None:
    """Stopped until its tokens are merged, woken, stopped again until it is cut off, woken: it goes on by itself."""
    child = f"import json, sys; sys.path.insert(0, {str(PROGRAM.parent)!r}); from client import complete; "
    child += f"print(json.dumps(complete(sys.argv[1], {PROMPTS!r}, 600)))"

    async def main() -> None:
        async with LoopServer(str(tmp_path), pace=0.05) as control:
            control.narrow()
            counts = forms(control)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-P", "-c", child, control.endpoint), stdout=asyncio.subprocess.PIPE
            )
            await control.until(lambda: counts["dense"] > 5)
            os.kill(process.pid, signal.SIGSTOP)
            control.pace = 0.001
            await control.until(lambda: control.values()["client_waiting_tokens"] > 100)
            control.pace = 0.05
            os.kill(process.pid, signal.SIGCONT)
            await control.until(lambda: counts["merged"] > 0)
            (session,) = control.control.sessions.by_owner.values()
            control.control.delivery.doom(session, "slow", "the test says so")
            control.pace = 0.0
            out, _ = await asyncio.wait_for(process.communicate(), 120)
            assert json.loads(out) == await reference(control.endpoint, PROMPTS, 600)
            assert control.values()["requests_total"] > 2 * len(PROMPTS), "it came back"

    asyncio.run(main())


def test_a_refusal_is_raised(tmp_path: Path) -> None:
    async def main() -> None:
        async with LoopServer(str(tmp_path)) as control:
            with pytest.raises(RuntimeError, match=r"too_long: the prompt has 30000 tokens"):
                await asyncio.to_thread(load().complete, control.endpoint, [[1] * 30_000], 5)

    asyncio.run(main())


def test_the_session_is_where_it_looks_for_it() -> None:
    assert Welcome.__struct_fields__[11] == "session"
