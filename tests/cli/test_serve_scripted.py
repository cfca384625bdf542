"""``evenflow serve scripted``: the real launcher, control, gateway and workers, without arithmetic."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import psutil
import pytest

EVENFLOW = [sys.executable, "-P", "-c", "from evenflow.cli.main import run; run()"]
PATIENCE = 60.0


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Server:
    """``evenflow serve`` in a process of its own, ready."""

    def __init__(self, folder: Path, *arguments: str) -> None:
        self.out = folder / "out"
        self.err = folder / "err"
        # Its own place for sockets, so that the processes of this server can be told from all others.
        self.run_dir = Path("/tmp") / f"t{os.getpid()}-{id(self) % 10**6}"
        self.run_dir.mkdir(mode=0o700)
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*EVENFLOW, "serve", "scripted", "--port", "0", *arguments],
                stdout=out,
                stderr=err,
                start_new_session=True,
                env={**os.environ, "XDG_RUNTIME_DIR": str(self.run_dir)},
            )
        wait_for(lambda: "ready: " in self.out.read_text() or self.process.poll() is not None)
        found = re.search(r"ready: (http://\S+)", self.out.read_text())
        assert found, self.err.read_text()
        self.url = found[1]
        self.children = psutil.Process(self.process.pid).children(recursive=True)

    def gone(self) -> bool:
        return not any(
            child.is_running() and child.status() != psutil.STATUS_ZOMBIE
            for child in self.children
            if psutil.pid_exists(child.pid)
        )

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(PATIENCE)
        wait_for(self.gone)
        for left in self.run_dir.glob("*/*"):
            left.unlink()
        for left in self.run_dir.glob("*"):
            left.rmdir()
        self.run_dir.rmdir()


Serve = Callable[..., Server]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Serve]:
    servers: list[Server] = []

    def serve(*arguments: str) -> Server:
        servers.append(Server(tmp_path, *arguments))
        return servers[-1]

    yield serve
    for server in servers:
        server.close()


class Stream(threading.Thread):
    """Streams one completion of ``tokens`` tokens that nothing but the length ends."""

    def __init__(self, url: str, tokens: int) -> None:
        super().__init__()
        self._url = url
        self._tokens = tokens
        self.chunks: list[dict[str, object]] = []
        self.done = False
        self.error: str | None = None
        self.start()

    def run(self) -> None:
        body = {
            "model": "scripted",
            "prompt": "a b c",
            "max_tokens": self._tokens,
            "min_tokens": self._tokens,
            "temperature": 0,
            "stream": True,
        }
        try:
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE) as answer:
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        self.done = True
                    elif line.startswith("data: "):
                        self.chunks.append(json.loads(line[6:]))
        except httpx.HTTPError as error:
            self.error = repr(error)

    @property
    def finish_reasons(self) -> list[object]:
        choices = [choice for chunk in self.chunks for choice in chunk.get("choices") or []]  # type: ignore[union-attr]
        return [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]

    @property
    def failed(self) -> bool:
        return self.error is not None or any("error" in chunk for chunk in self.chunks)


def test_drain_finishes_streams_and_refuses_new_work_ft5(start: Serve) -> None:
    """FT-5: SIGTERM at token 10 of 200; readiness 503 at once, new work 503, the stream whole, exit code 0."""
    server = start("--step-ms", "20")
    assert httpx.get(f"{server.url}/ready").status_code == 200
    stream = Stream(server.url, 200)
    wait_for(lambda: len(stream.chunks) >= 10)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: httpx.get(f"{server.url}/ready").status_code == 503, 2.0)
    refused = httpx.post(f"{server.url}/v1/completions", json={"model": "scripted", "prompt": "x"}, timeout=PATIENCE)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) >= 1
    stream.join(PATIENCE)
    assert stream.done and not stream.failed and stream.finish_reasons == ["length"]
    assert server.process.wait(PATIENCE) == 0
    wait_for(server.gone)
    assert list(server.run_dir.iterdir()) == []


def test_drain_limit_ends_the_rest_with_an_error_ft5(start: Serve) -> None:
    """FT-5: at the limit what still runs gets an error event, and the server ends."""
    server = start("--step-ms", "20", "--drain-timeout", "0.5")
    stream = Stream(server.url, 4000)
    wait_for(lambda: len(stream.chunks) >= 10)
    server.process.send_signal(signal.SIGTERM)
    stream.join(PATIENCE)
    assert any("error" in chunk for chunk in stream.chunks) and not stream.done
    assert server.process.wait(PATIENCE) == 0
    wait_for(server.gone)


def test_interrupt_while_idle_ends_soon_obs4(start: Serve) -> None:
    """OBS-4: Ctrl-C with nothing to do; and nothing that was written to files had colours."""
    server = start()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(10.0) == 0
    wait_for(server.gone)
    assert "\x1b" not in server.out.read_text() + server.err.read_text()


def test_interrupt_while_streaming_ends_soon_obs4(start: Serve) -> None:
    """OBS-4: Ctrl-C ends in at most ten seconds, whatever runs."""
    server = start("--step-ms", "20", "--stages", "2")
    stream = Stream(server.url, 4000)
    wait_for(lambda: len(stream.chunks) >= 10)
    server.process.send_signal(signal.SIGINT)
    server.process.wait(10.0)
    stream.join(PATIENCE)
    assert stream.failed
    wait_for(server.gone)


def test_second_signal_ends_at_once_ft5(start: Serve) -> None:
    server = start("--step-ms", "20")
    stream = Stream(server.url, 4000)
    wait_for(lambda: len(stream.chunks) >= 10)
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: "stopping" in server.err.read_text())
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(10.0) == 1
    stream.join(PATIENCE)
    assert stream.failed
    wait_for(server.gone)


def test_killed_launcher_takes_its_children_with_it(start: Serve) -> None:
    server = start("--stages", "2", "--replicas", "2")
    assert len(server.children) == 6
    server.process.kill()
    wait_for(server.gone, 10.0)


def test_corrupt_model_is_the_last_line_ft4(tmp_path: Path) -> None:
    """FT-4: exit code 1 and the cause last, whichever process met it first."""
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF" + b"\xff" * 64)
    result = subprocess.run(
        [*EVENFLOW, "serve", str(path), "--port", "0"], capture_output=True, text=True, timeout=2 * PATIENCE
    )
    assert result.returncode == 1
    assert "failed at start (exit code 1): " in result.stderr.splitlines()[-1]
    assert "broken.gguf" in result.stderr


def test_interrupt_while_a_model_is_loaded_ft4_obs4() -> None:
    """FT-4: Ctrl-C two seconds into loading a real model: it ends soon, and no child is left."""
    process = subprocess.Popen(
        [*EVENFLOW, "serve", "smollm2-135m", "--port", "0", "--stages", "2"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    time.sleep(2.0)
    children = psutil.Process(process.pid).children(recursive=True)
    assert children
    process.send_signal(signal.SIGINT)
    process.wait(15.0)
    _, alive = psutil.wait_procs(children, timeout=1.0)
    assert not alive


def test_generate_with_a_private_server() -> None:
    result = subprocess.run(
        [*EVENFLOW, "generate", "scripted", "--prompt", "a b c", "--max-tokens", "5"],
        capture_output=True,
        text=True,
        timeout=2 * PATIENCE,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() and result.stderr == ""
