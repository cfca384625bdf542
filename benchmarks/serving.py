"""A server for the duration of a benchmark, as a user starts it, and what its control process costs."""

from __future__ import annotations

import contextlib
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil


@dataclass(frozen=True, slots=True)
class Served:
    """Where a running server answers."""

    url: str
    endpoint: str
    pid: int  #: the launcher's


@contextlib.contextmanager
def served(model: str, *arguments: str, patience: float = 120.0) -> Iterator[Served]:
    """Start ``evenflow serve MODEL … --port 0``, wait until it is ready, end it afterwards."""
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "evenflow.cli", "serve", model, "--port", "0", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    lines: list[str] = []
    ready = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if line.startswith("ready: "):
                ready.set()
        ready.set()

    threading.Thread(target=read, daemon=True).start()
    try:
        if not ready.wait(patience) or process.poll() is not None:
            raise RuntimeError("the server did not start:\n" + "".join(lines[-20:]))
        log = "".join(lines)
        url = re.search(r"ready: (\S+)", log)
        endpoint = re.search(r"ZeroMQ clients dial (\S+)", log)
        assert url is not None and endpoint is not None
        yield Served(url[1], endpoint[1], process.pid)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


def threads_of(pid: int) -> dict[int, float]:
    """Seconds of CPU of each thread of a process, to the nanosecond."""
    times: dict[int, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        times[int(task.name)] = int((task / "schedstat").read_text().split()[0]) / 1e9
    return times


def control_of(server: Served) -> int:
    """The control process of a server."""
    for process in psutil.Process(server.pid).children(recursive=True):
        if " ".join(process.cmdline()).startswith("evenflow control"):
            return process.pid
    raise RuntimeError("the server has no control process")
