"""The process that writes a journal, as the control process sees it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque

import structlog

from .ring import CAPACITY, RingClosed, RingWriter

log = structlog.get_logger("evenflow.control")

#: Bytes that wait while the ring is full, at most: past that the journal ends, the server goes on.
_MOST_WAITING = 64 << 20
#: Seconds that the writer gets for the rest when the control process ends. It goes on by itself after that.
_PATIENCE_S = 5.0


def writer_command(path: str, most: int, log_level: str) -> list[str]:
    """Starts the writer of ``path`` and the file before it, which take at most ``most`` bytes."""
    module = [sys.executable, "-P", "-m", "evenflow.control.journal"]
    return [*module, path, "--size", str(most), "--log-level", log_level]


class JournalLink:
    """Starts the writer by ``command``, to which the descriptors of the ring are added. It ends by itself when this
    process does, however that ends, and writes the rest first."""

    def __init__(
        self,
        command: list[str],
        capacity: int = CAPACITY,
        most_waiting: int = _MOST_WAITING,
        patience: float = _PATIENCE_S,
    ) -> None:
        memory = os.memfd_create("evenflow journal", os.MFD_CLOEXEC)
        hears, told = os.pipe()
        heard, tells = os.pipe()
        self._ring = RingWriter(memory, told, heard, capacity)
        self._untold = capacity >> 2  #: bytes that the writer is told of at once
        self._most_waiting = most_waiting
        self._patience = patience
        self._pieces: deque[tuple[bytes, bool]] = deque()  #: that wait for room in the ring, and whether more follow
        self.waiting = 0  #: bytes that wait
        self.lost = False  #: the journal has ended before its time
        self.process = subprocess.Popen(
            [*command, "--ring", *map(str, (memory, hears, tells))],
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, hears, tells),
            start_new_session=True,
        )
        for descriptor in (memory, hears, tells):
            os.close(descriptor)

    def hand(self, data: bytes | bytearray, soon: bool) -> None:
        """Give a message to the writer, without waiting for it. It hears of it when it is wanted ``soon``, or there
        is much to hear: to wake it each time would cost more than all else."""
        if self.lost:
            return
        ring = self._ring
        try:
            if data and (self._pieces or len(data) > ring.most or not ring.put(data)):
                self._wait(data)
            if self._pieces:
                self._move()
            if soon or self._pieces or ring.untold > self._untold:
                ring.tell()
        except RingClosed:
            self._lose("its writer has ended")
        if self.waiting > self._most_waiting:
            self._lose("its writer does not keep up")

    def _wait(self, data: bytes | bytearray) -> None:
        """Let ``data`` wait, in pieces that fit the ring."""
        most, size = self._ring.most, len(data)
        for at in range(0, size, most):
            self._pieces.append((bytes(data[at : at + most]), at + most < size))
        self.waiting += size

    def _move(self) -> None:
        """Put what waits into the ring, as far as there is room."""
        pieces, ring = self._pieces, self._ring
        while pieces and ring.put(*pieces[0]):
            self.waiting -= len(pieces.popleft()[0])

    def _lose(self, reason: str) -> None:
        self.lost = True
        self._pieces.clear()
        self.waiting = 0
        log.error("the journal ends, the server goes on", reason=reason)

    def close(self) -> None:
        """Everything has been handed over. Waits for the writer, but not for long."""
        deadline = time.monotonic() + self._patience
        if not self.lost:
            self._finish(deadline)
        self._ring.close()
        try:
            self.process.wait(max(deadline - time.monotonic(), 0.0))
        except subprocess.TimeoutExpired:
            log.warning("the journal is still being written", pid=self.process.pid)

    def _finish(self, deadline: float) -> None:
        """Let what waits go to the writer, as far as it takes it in time."""
        ring = self._ring
        try:
            self._move()
            ring.tell()
            while self._pieces and (left := deadline - time.monotonic()) > 0.0:
                ring.wait(left)
                self._move()
                ring.tell()
        except RingClosed:
            self._lose("its writer has ended")
        if self._pieces:
            self._lose("its writer does not keep up")
