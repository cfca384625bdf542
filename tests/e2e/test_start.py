"""Starts that fail, many starts at once, and clients whose server is gone: cases FT-4, ZMQ-1, ZMQ-5, OBS-4."""

import re
import shutil
import signal
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from evenflow.control.wire.location import locate_model
from live_server import PATIENCE, LiveServer, live, wait_for

pytestmark = pytest.mark.xdist_group("scripted")


def test_a_corrupt_tensor_of_stage_1_ft4(tmp_path: Path) -> None:
    """The first cause is the last line, the exit code is 1, and no child is left."""
    path = tmp_path / "corrupt.gguf"
    shutil.copyfile(locate_model("smollm2-135m"), path)
    name = b"blk.29.attn_norm.weight"
    with path.open("r+b") as file:
        place = file.read(1 << 23).index(name) + len(name)
        # Number of dimensions, then the first of them.
        file.seek(place)
        assert struct.unpack("<IQ", file.read(12)) == (1, 576)
        file.seek(place + 4)
        file.write(struct.pack("<Q", 577))
    server = LiveServer(str(path), "--stages", "2")
    try:
        assert server.process.wait(PATIENCE) == 1
        server.assert_gone()
        last = server.log.splitlines()[-1]
        # Both stages read the table of tensors: whichever was first is named.
        assert re.match(r"worker 0\.[01] failed at start \(exit code 1\): ", last), server.log
        assert "layers.29.input_layernorm.weight has shape (577,)" in last
    finally:
        server.close()


def test_a_taken_port_is_said_before_anything_is_loaded_ft4() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        server = LiveServer("smollm2-135m", port=port)
        try:
            assert server.process.wait(PATIENCE) == 1
            server.assert_gone()
            assert server.log.splitlines() == [
                f"Port {port} of 127.0.0.1 is taken by another process; choose another with --port."
            ]
        finally:
            server.close()


def test_an_interrupt_ends_an_idle_server_obs4() -> None:
    with live("scripted") as server:
        assert server.stop(signal.SIGINT) == 0
        assert "\x1b[" not in server.log


@pytest.mark.parametrize("round_", range(2))
def test_eight_servers_at_the_same_moment_zmq5(round_: int) -> None:
    servers = [LiveServer("scripted") for _ in range(8)]
    try:
        for server in servers:
            server.ready()
        assert len({server.url for server in servers}) == len({server.endpoint for server in servers}) == 8
        for server in servers:
            answer = server.post("/v1/completions", prompt="a", max_tokens=3)
            assert answer.status_code == 200
            assert server.metrics().get("evenflow_worker_restarts_total", 0) == 0
        # All at once again.
        for server in servers:
            server.process.terminate()
        for server in servers:
            assert server.process.wait(PATIENCE) == 0
    finally:
        for server in servers:
            server.close()


_CLIENT = """
import asyncio, sys
from evenflow.control.client import AsyncClient
async def main():
    async with AsyncClient(sys.argv[1]) as client:
        stream = await client.submit([1, 2, 3], max_tokens=4000, stop_ids=())
        print("submitted", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
    print("closed", flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("where", ["never there", "killed"])
def test_a_client_without_a_server_exits_zmq1(tmp_path: Path, where: str) -> None:
    with live("scripted") as server:
        endpoint = server.endpoint if where == "killed" else f"ipc://{tmp_path}/nobody"
        client = subprocess.Popen(
            [sys.executable, "-P", "-c", _CLIENT, endpoint], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        with client:
            assert client.stdin is not None and client.stdout is not None
            assert client.stdout.readline() == "submitted\n"
            if where == "killed":
                wait_for(lambda: server.metrics().get("evenflow_num_requests_running"), why="a running request")
                server.process.kill()
                server.process.wait(10.0)
                wait_for(lambda: not server.members(), 10.0)
            client.stdin.write("\n")
            client.stdin.flush()
            assert client.stdout.readline() == "closed\n"
            closed = time.monotonic()
            assert client.wait(PATIENCE) == 0
            print(f"exit {time.monotonic() - closed:.2f} s after the close")
            assert time.monotonic() - closed < 2.0
