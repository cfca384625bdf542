"""The launcher with stand-ins for its children (``fake_child.py``): real processes, real sockets, no model."""

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
#: Seconds until anything that a test waits for must have happened, on a busy machine too.
PATIENCE = 30.0


def wait_for(what: Callable[[], object], seconds: float = PATIENCE) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


class Served:
    """A running launcher, its log of events, and what it printed."""

    def __init__(
        self, folder: Path, modes: str = "", port: int = 0, limit: float = 30.0, place: Path | None = None
    ) -> None:
        """``place``: where its private directories go, else where those of all servers do."""
        self.folder = folder
        self.log = folder / "log"
        self._out = folder / "out"
        self._err = folder / "err"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, "-P", HERE / "fake_serve.py", self.log, str(port), modes, str(limit)],
                stdout=out,
                stderr=err,
                start_new_session=True,
                env=None if place is None else {**os.environ, "XDG_RUNTIME_DIR": str(place)},
            )

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def events(self) -> list[tuple[str, str, int, str]]:
        """(name, event, pid, detail), in order."""
        if not self.log.exists():
            return []
        rows = [line.split(" ", 3) for line in self.log.read_text().splitlines()]
        return [(name, event, int(pid), detail.strip()) for name, event, pid, detail in rows]

    def pids(self, name: str) -> list[int]:
        """The process of each life of a child."""
        return [pid for who, event, pid, _ in self.events() if who == name and event == "start"]

    def saw(self, name: str, event: str) -> bool:
        return any((who, what) == (name, event) for who, what, _, _ in self.events())

    def wait_ready(self) -> None:
        wait_for(lambda: "ready: " in self.out)
        wait_for(lambda: self.saw("control", "launcher"))
        wait_for(lambda: all(self.pids(name) for name in ("gateway", "worker0.0", "worker0.1")))

    def wait_exit(self, seconds: float = PATIENCE) -> int:
        return self.process.wait(seconds)

    def directories(self) -> list[Path]:
        return [Path(line) for line in (self.folder / "dirs").read_text().split()]

    def children_gone(self) -> bool:
        """No process of this run is alive, whoever its parent is."""
        for process in psutil.process_iter(["cmdline", "status"]):
            words = process.info["cmdline"] or []
            if str(self.log) in words and process.info["status"] != psutil.STATUS_ZOMBIE:
                return False
        return True


Serve = Callable[..., Served]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Serve]:
    servers: list[Served] = []

    def serve(modes: str = "", port: int = 0, limit: float = 30.0, place: Path | None = None) -> Served:
        folder = tmp_path / str(len(servers))
        folder.mkdir()
        servers.append(Served(folder, modes, port, limit, place))
        return servers[-1]

    yield serve
    for server in servers:
        if server.process.poll() is None:
            server.process.kill()
        server.process.wait(PATIENCE)
        wait_for(server.children_gone)


def gone(server: Served) -> None:
    """Nothing of it remains: no process, no directory."""
    wait_for(server.children_gone)
    assert not any(folder.exists() for folder in server.directories())


def test_ready_line_and_orderly_end(start: Serve) -> None:
    server = start("control=slow-drain")
    server.wait_ready()
    assert re.search(r"^ready: http://127\.0\.0\.1:\d+ \(model fake, 2 stages,", server.out)
    assert server.err.startswith("a note\n")
    assert "[worker 0.0] loading" in server.err
    assert "\x1b" not in server.out + server.err, "colour codes in a pipe"
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    ends = [name for name, event, _, _ in server.events() if event == "end"]
    assert ends.index("control") < min(ends.index("worker0.0"), ends.index("worker0.1")), (
        "streams get their last tokens only while workers live"
    )
    assert sorted(ends) == ["control", "gateway", "worker0.0", "worker0.1"]
    gone(server)


def test_private_directories(start: Serve) -> None:
    server = start()
    server.wait_ready()
    for folder in server.directories():
        assert folder.stat().st_mode & 0o777 == 0o700
    # The port is on loopback only; the other sockets are files in the private directory.
    listening = [c for c in psutil.Process(server.process.pid).net_connections("tcp") if c.status == "LISTEN"]
    assert [c.laddr.ip for c in listening] == ["127.0.0.1"]


@pytest.mark.parametrize("name", ["control", "gateway", "worker0.0", "worker0.1"])
def test_what_dies_is_started_again(start: Serve, name: str) -> None:
    server = start()
    server.wait_ready()
    first = server.pids(name)[0]
    os.kill(first, signal.SIGKILL)
    wait_for(lambda: len(server.pids(name)) == 2)
    if name.startswith("worker"):
        told = f"0.{name[-1]} {first} -9"
        wait_for(lambda: ("control", "told", told) in [(who, what, text) for who, what, _, text in server.events()])
    if name == "control":
        # The new control does not know the launcher until it was asked to say hello again.
        again = server.pids("control")[1]
        wait_for(lambda: any(event == "launcher" and pid == again for _, event, pid, _ in server.events()))
    assert "signal SIGKILL" in server.err
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit() == 0
    gone(server)


def test_second_death_waits_a_little_and_both_are_reported(start: Serve) -> None:
    server = start()
    server.wait_ready()
    os.kill(server.pids("worker0.1")[0], signal.SIGKILL)
    wait_for(lambda: len(server.pids("worker0.1")) == 2)
    os.kill(server.pids("worker0.1")[1], signal.SIGKILL)
    wait_for(lambda: len(server.pids("worker0.1")) == 3)
    assert "started again at once" in server.err
    assert "started again in 0.5 s" in server.err


def test_control_orders_a_kill(start: Serve) -> None:
    server = start("worker0.0=stubborn")
    server.wait_ready()
    pid = server.pids("worker0.0")[0]
    # A number that is not this worker's is left alone.
    (server.folder / "order").write_text(f"0 0 {server.pids('worker0.1')[0]}")
    wait_for(lambda: server.saw("control", "ordered"))
    # So is whoever is too young to be missed.
    (server.folder / "order").write_text("0 0 0")
    time.sleep(0.5)
    assert len(server.pids("worker0.0")) == 1
    (server.folder / "order").write_text(f"0 0 {pid}")
    wait_for(lambda: len(server.pids("worker0.0")) == 2)
    assert len(server.pids("worker0.1")) == 1


def test_child_that_fails_at_start_is_the_last_thing_said_ft4(start: Serve) -> None:
    """FT-4: exit code 1, the first cause last, no child left."""
    server = start("control=never-ready,worker0.1=fail")
    assert server.wait_exit(15.0) == 1
    last = server.err.splitlines()[-1]
    assert last == "worker 0.1 failed at start (exit code 1): ValueError: tensor blk.1.attn_q is corrupt"
    gone(server)


def test_child_that_is_killed_again_and_again_at_start(start: Serve) -> None:
    server = start("control=never-ready,worker0.1=killed")
    assert server.wait_exit() == 1
    assert server.err.splitlines()[-1].startswith("worker 0.1 failed at start (signal SIGKILL)")
    assert len(server.pids("worker0.1")) == 3
    gone(server)


def test_control_says_that_it_cannot_start(start: Serve) -> None:
    server = start("control=fatal")
    assert server.wait_exit() == 1
    assert server.err.splitlines()[-1] == "the pool has no room for one sequence"
    gone(server)


def test_interrupt_while_loading_ft4(start: Serve) -> None:
    """FT-4, OBS-4: Ctrl-C while loading ends everything, also what ignores SIGTERM."""
    server = start("control=never-ready,worker0.0=stubborn")
    wait_for(lambda: server.pids("worker0.0") and server.pids("worker0.1") and server.saw("control", "launcher"))
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit(10.0) == 0
    gone(server)


def test_second_signal_stops_at_once_ft5(start: Serve) -> None:
    """FT-5: while a drain goes on, a second signal ends everything."""
    server = start("control=long-drain")
    server.wait_ready()
    server.process.send_signal(signal.SIGTERM)
    wait_for(lambda: server.saw("control", "draining"))
    server.process.send_signal(signal.SIGTERM)
    assert server.wait_exit(10.0) == 1
    assert not server.saw("control", "end")
    gone(server)


def test_control_that_does_not_end_is_killed(start: Serve) -> None:
    server = start("control=long-drain", limit=0.0)
    server.wait_ready()
    server.process.send_signal(signal.SIGINT)
    assert server.wait_exit(15.0) == 1
    gone(server)


def test_killed_launcher_leaves_no_process_and_the_next_one_tidies_up(start: Serve) -> None:
    # A place of its own: whichever server of this machine starts next tidies up after all that were killed.
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        place = Path(name)
        server = start("worker0.0=stubborn", place=place)
        server.wait_ready()
        server.process.kill()
        server.wait_exit()
        wait_for(server.children_gone)
        assert all(folder.exists() for folder in server.directories())
        other = start(place=place)
        other.wait_ready()
        assert not any(folder.exists() for folder in server.directories())
        assert all(folder.exists() for folder in other.directories())
        other.process.send_signal(signal.SIGTERM)
        other.wait_exit()


def test_port_taken_is_known_before_anything_is_loaded_ft4(start: Serve) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        server = start(port=port)
        assert server.wait_exit() == 1
    assert server.err.splitlines()[-1] == (
        f"Port {port} of 127.0.0.1 is taken by another process; choose another with --port."
    )
    assert server.events() == []


def test_servers_started_at_the_same_moment_do_not_collide_zmq5(start: Serve) -> None:
    """ZMQ-5: free ports and private directories; all are ready and all are different."""
    servers = [start() for _ in range(8)]
    for server in servers:
        server.wait_ready()
    assert len({server.out for server in servers}) == 8
    assert len({folder for server in servers for folder in server.directories()}) == 16
    for server in servers:
        server.process.send_signal(signal.SIGTERM)
    for server in servers:
        assert server.wait_exit() == 0
        gone(server)
        assert len(server.pids("control")) == 1


def test_output_that_nobody_reads_stops_nothing(tmp_path: Path) -> None:
    """A full pipe on stderr costs log lines, not supervision."""
    log = tmp_path / "log"
    read, write = os.pipe()
    os.set_blocking(write, False)
    try:
        while True:
            os.write(write, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(write, True)
    out = tmp_path / "out"
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-P", HERE / "fake_serve.py", log, "0", ""], stdout=file, stderr=write
        )
    os.close(write)
    try:
        wait_for(lambda: log.exists() and log.read_text().count(" start ") == 4)
        wait_for(lambda: " launcher " in log.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE) == 0
    finally:
        os.close(read)
        process.kill()
        process.wait()
