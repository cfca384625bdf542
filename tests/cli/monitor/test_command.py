"""``evenflow monitor`` as a program, against live servers and none."""

import asyncio
import json
import os
import pty
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from evenflow.cli.monitor.command import NoServer, find_endpoint, snapshots
from evenflow.cli.monitor.snapshot import Snapshot
from live_server import EVENFLOW, PATIENCE, HttpStream, LiveServer, live

pytestmark = pytest.mark.xdist_group("scripted")


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    with live("scripted", "--stages", "2", "--step-ms", "10") as started:
        yield started


def monitor(*arguments: str, run_parent: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "XDG_RUNTIME_DIR": str(run_parent)} if run_parent is not None else None
    return subprocess.run(
        [*EVENFLOW, "monitor", *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        stdin=subprocess.DEVNULL,
        env=env,
    )


def test_one_object_says_what_the_server_does(server: LiveServer) -> None:
    stream = HttpStream(server.url, prompt="a b c", max_tokens=3000, ignore_eos=True)
    try:
        result = monitor("--once", "--json", run_parent=server.run_parent)
        assert result.returncode == 0, result.stderr
        said = json.loads(result.stdout)
    finally:
        stream.leave()
    assert said["state"] == "ready" and said["model"] == "scripted" and said["replicas"] == ["up"]
    (request,) = said["requests"]
    assert request["phase"] == "decode" and request["output"] > 0 and request["limit"] == 3000
    assert said["iterations"] and said["iterations"][0]["decodes"] == 1
    assert said["iterations"][0]["milliseconds"] > 5
    assert said["output_rate"] > 0 and len(said["ttft"]) == len(said["tbt"]) == 3
    assert [(s["replica"], s["stage"]) for s in said["stages"]] == [(0, 0), (0, 1)]
    assert said["blocks_used"] > 0


def test_a_picture_for_people_has_no_colours_in_a_pipe_obs4(server: LiveServer) -> None:
    result = monitor("--once", server.url, run_parent=server.run_parent)
    assert result.returncode == 0 and "scripted" in result.stdout and "\x1b" not in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 100


def test_without_a_terminal_there_is_no_screen_obs4() -> None:
    result = monitor()
    assert result.returncode == 2 and result.stdout == ""
    assert "--once" in result.stderr and "--json" in result.stderr and "Traceback" not in result.stderr


def test_without_a_server_it_says_so(tmp_path: Path) -> None:
    for arguments in (("--once",), ("--once", "http://127.0.0.1:9"), ("--once", f"ipc://{tmp_path}/none")):
        result = monitor(*arguments)
        if arguments == ("--once",) and result.returncode == 0:
            continue  # another server of this user runs on this machine
        assert result.returncode == 1 and "server" in result.stderr and "Traceback" not in result.stderr


def test_a_server_is_found_by_url_folder_or_endpoint(server: LiveServer) -> None:
    environ = {"XDG_RUNTIME_DIR": str(server.run_parent)}
    (folder,) = server.run_parent.iterdir()
    expected = f"ipc://{folder}/clients"
    for target in (server.url, f"{server.url}/v1/", str(folder), expected):
        assert find_endpoint(target, environ) == expected
    with pytest.raises(NoServer, match="is at http"):
        find_endpoint("http://127.0.0.1:9", environ)


def test_a_screen_ends_clean_with_ctrl_c(server: LiveServer) -> None:
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [*EVENFLOW, "top", server.endpoint, "--interval", "0.25"],
        stdin=slave,
        stdout=slave,
        stderr=subprocess.PIPE,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "40", "LINES": "12"},
    )
    os.close(slave)
    try:
        shown = b""
        while shown.count(b"evenflow") < 3:
            shown += os.read(master, 65536)
        process.send_signal(signal.SIGINT)
        while True:
            try:
                piece = os.read(master, 65536)
            except OSError:
                break
            shown += piece
        _, errors = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        os.close(master)
    assert process.returncode == 0 and b"Traceback" not in shown + errors, errors
    # The other screen is left, and the cursor is back.
    assert shown.rfind(b"\x1b[?1049l") > shown.rfind(b"\x1b[?1049h") and shown.rfind(b"\x1b[?25h") > 0


def test_a_reader_that_leaves_ends_it(server: LiveServer) -> None:
    with subprocess.Popen(
        [*EVENFLOW, "monitor", server.endpoint, "--json", "--interval", "0.25"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None and process.stderr is not None
        assert json.loads(process.stdout.readline())["state"] == "ready"
        process.stdout.close()
        assert process.wait(PATIENCE) == 0
        assert process.stderr.read() == b""


def test_it_lives_through_a_restart_of_the_control_process() -> None:
    async def main(server: LiveServer) -> None:
        seen: list[Snapshot] = []

        async def until(state: str, least: int = 0) -> None:
            async with asyncio.timeout(PATIENCE):
                async for snapshot in stream:
                    seen.append(snapshot)
                    if snapshot.state == state and len(snapshot.iterations) >= least:
                        return

        stream = snapshots(server.endpoint, 0.25)
        try:
            await until("ready")
            await asyncio.to_thread(server.kill, "control", signal.SIGSTOP)
            await until("lost")
            await asyncio.to_thread(server.kill, "control", signal.SIGKILL)
            await until("ready")
            stop = asyncio.Event()

            async def load() -> None:
                async with httpx.AsyncClient(timeout=PATIENCE) as http:
                    while not stop.is_set():
                        await http.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 20})

            working = asyncio.create_task(load())
            await until("ready", least=1)
            stop.set()
            await working
        finally:
            await stream.aclose()  # type: ignore[attr-defined]

    with live("scripted", "--step-ms", "5") as server:
        asyncio.run(main(server))


def test_it_starts_without_torch() -> None:
    program = "import sys; import evenflow.cli.monitor.command; assert 'torch' not in sys.modules"
    assert subprocess.run([sys.executable, "-P", "-c", program], timeout=PATIENCE).returncode == 0
