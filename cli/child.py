"""One life of one child process: started, listened to, and reaped when its sentinel says that it ended.

The sentinel is a pidfd in the event loop: no polling, and no signal can reach a process that only reused the
number. Each child is a session of its own, so a Ctrl-C at the terminal reaches the launcher alone, which
then decides.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
from collections import deque
from collections.abc import Callable

from .children import ChildSpec

#: Lines of a child's output that are kept for the report of its death.
KEPT_LINES = 40
LONGEST_LINE = 1 << 16
_READ = 1 << 16


class Child:
    """A running process. ``on_exit(child, status)`` is called once, after its last output was handed on.

    ``status`` as in ``subprocess``: negative for a signal.
    """

    def __init__(
        self,
        spec: ChildSpec,
        loop: asyncio.AbstractEventLoop,
        on_line: Callable[[str], None],
        on_exit: Callable[["Child", int], None],
    ) -> None:
        self.spec = spec
        self.started_at = loop.time()
        self.status: int | None = None
        self.ended = asyncio.Event()
        self._loop = loop
        self._on_line = on_line
        self._on_exit = on_exit
        self._partial = b""
        self._tail: deque[str] = deque(maxlen=KEPT_LINES)
        self._process = subprocess.Popen(
            spec.argv,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=dict(spec.env),
            pass_fds=spec.pass_fds,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._pipe = self._process.stdout.fileno()
        os.set_blocking(self._pipe, False)
        try:
            self._pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            raise
        loop.add_reader(self._pipe, self._read)
        loop.add_reader(self._pidfd, self._exited)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def last_words(self) -> str:
        """The last line it wrote, or nothing."""
        return next((line.strip() for line in reversed(self._tail) if line.strip()), "")

    def terminate(self) -> None:
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, and what it started in its session."""
        if self.alive:
            # The process is unreaped as long as ``alive``, so its number and its group's are still its own.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._send(signal.SIGKILL)

    def _send(self, number: signal.Signals) -> None:
        if self.alive:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, number)

    async def wait(self, timeout: float) -> bool:
        """Whether it ended within ``timeout`` seconds."""
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.ended.wait(), timeout)
        return not self.alive

    def reap(self, timeout: float) -> None:
        """Outside the event loop, at the very end: kill it and wait for it."""
        if self.alive:
            self.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.status = self._process.wait(timeout)

    def _read(self) -> None:
        try:
            data = os.read(self._pipe, _READ)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._loop.remove_reader(self._pipe)
        self._take(data)

    def _take(self, data: bytes) -> None:
        *lines, self._partial = (self._partial + data).split(b"\n")
        if len(self._partial) > LONGEST_LINE:
            lines.append(self._partial)
            self._partial = b""
        for raw in lines:
            line = raw.decode("utf-8", "replace").rstrip("\r")
            self._tail.append(line)
            self._on_line(f"[{self.spec.name}] {line}")

    def _exited(self) -> None:
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._pipe)
        with contextlib.suppress(OSError):
            while data := os.read(self._pipe, _READ):
                self._take(data)
        if self._partial:
            self._take(b"\n")
        # Still a zombie here: its group's number cannot have been given to anyone else.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self.status = self._process.wait()
        os.close(self._pidfd)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self.ended.set()
        self._on_exit(self, self.status)


def describe(status: int) -> str:
    """``exit code 1``, ``signal SIGKILL``."""
    if status >= 0:
        return f"exit code {status}"
    try:
        return f"signal {signal.Signals(-status).name}"
    except ValueError:
        return f"signal {-status}"
