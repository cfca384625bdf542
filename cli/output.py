"""What the launcher says: logs to stderr, announcements to stdout, a spinner on a terminal.

A thread does the writing, from a bounded queue: a reader who stopped reading (a full pipe, a paused
terminal) costs log lines, never the supervision of the children. Colours and movement only on a terminal.
"""

import contextlib
import os
import queue
import threading
from typing import TextIO

QUEUED_LINES = 4096


class Output:
    """Writes lines in order. ``say``, ``announce`` and ``progress`` never block and never raise."""

    def __init__(self, out: TextIO, err: TextIO, quiet: bool = False) -> None:
        self._out = out
        self._err = err
        self._quiet = quiet
        self._lost = 0
        self._queue: queue.Queue[tuple[str, str] | None] = queue.Queue(QUEUED_LINES)
        self._animated = not quiet and err.isatty() and os.environ.get("TERM") != "dumb"
        self._thread = threading.Thread(target=self._write_all, name="output", daemon=True)
        self._thread.start()

    def say(self, line: str) -> None:
        """A log line."""
        if not self._quiet:
            self._put("say", line)

    def announce(self, line: str) -> None:
        """A line that a script may wait for."""
        if not self._quiet:
            self._put("announce", line)

    def progress(self, text: str) -> None:
        """What is being waited for now; empty ends it. On a terminal only."""
        if self._animated:
            self._put("progress", text)

    def close(self, last: str | None = None) -> None:
        """Write what is queued, then ``last`` (also when quiet). Takes a second at most."""
        with contextlib.suppress(queue.Full):
            self._queue.put(("progress", ""), timeout=0.2)
            if last is not None:
                self._queue.put(("say", last), timeout=0.2)
            self._queue.put(None, timeout=0.2)
        self._thread.join(1.0)

    def _put(self, kind: str, text: str) -> None:
        try:
            self._queue.put_nowait((kind, text))
        except queue.Full:
            self._lost += 1

    def _write_all(self) -> None:
        spinner = _Spinner(self._err) if self._animated else None
        while (item := self._queue.get()) is not None:
            kind, text = item
            # A closed pipe or a terminal that went away: go on without a reader.
            with contextlib.suppress(OSError, ValueError):
                if kind == "progress":
                    if spinner is not None:
                        spinner.show(text)
                    continue
                if self._lost:
                    lost, self._lost = self._lost, 0
                    self._err.write(f"({lost} log lines were dropped: nobody read them)\n")
                stream = self._out if kind == "announce" else self._err
                if spinner is not None and spinner.running:
                    spinner.write_above(text)
                else:
                    stream.write(text + "\n")
                    stream.flush()
        if spinner is not None:
            spinner.show("")


class _Spinner:
    """A rich status line. Only made when stderr is a terminal."""

    def __init__(self, err: TextIO) -> None:
        from rich.console import Console

        self._console = Console(file=err)
        self._status = self._console.status("")
        self.running = False

    def show(self, text: str) -> None:
        if text:
            self._status.update(text)
            if not self.running:
                self._status.start()
        elif self.running:
            self._status.stop()
        self.running = bool(text)

    def write_above(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)
