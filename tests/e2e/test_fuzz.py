"""SEC-1: hostile frames to every socket of a running system. ``fuzz.py`` sends a million of them."""

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from fuzz_server import command, fuzz
from live_server import wait_for

FRAMES = int(os.environ.get("EVENFLOW_FUZZ_FRAMES", "20000"))
SEED = int(os.environ.get("EVENFLOW_FUZZ_SEED", "0"))


@pytest.mark.xdist_group("live")
def test_sec_1_nothing_that_comes_to_a_socket_stops_or_disturbs_anything() -> None:
    report = fuzz(FRAMES, SEED)
    print(*report.lines(), sep="\n")
    assert not report.wrong, f"{report.wrong}\nagain: {command(FRAMES, SEED)}"
    assert report.served and all(report.sent.values())


@pytest.mark.xdist_group("live")
@pytest.mark.parametrize(("number", "processes"), [(signal.SIGTERM, 5), (signal.SIGINT, 5), (signal.SIGTERM, 1)])
def test_a_signal_ends_all_that_the_fuzzer_has_started(number: int, processes: int) -> None:
    """In the middle of its work, with the server's four processes, their launcher and a worker; and at its start."""
    script = Path(__file__).with_name("fuzz.py")
    command = [sys.executable, str(script), "--frames", str(10**9)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            seen: dict[psutil.Process, str] = {}

            def working() -> bool:
                for child in psutil.Process(process.pid).children(recursive=True):
                    with contextlib.suppress(psutil.Error):
                        seen.setdefault(child, child.environ().get("XDG_RUNTIME_DIR", ""))
                return len(seen) > processes

            wait_for(working, why="a whole system")
            process.send_signal(number)
            out, _ = process.communicate(timeout=120.0)
            assert process.returncode == 128 + number and "ended by SIG" in out
            wait_for(lambda: not any(map(alive, seen)), 10.0, "the end of all processes")
            assert not any(Path(folder).exists() for folder in seen.values() if folder.startswith("/tmp/ef"))
        finally:
            process.kill()
            for child in seen:
                with contextlib.suppress(psutil.Error):
                    child.kill()


def alive(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
