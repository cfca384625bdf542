"""The process that writes a journal, as the control process sees it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections import deque

import structlog
from msgspec import msgpack

from .recorder import Item
from .ring import CAPACITY, RingClosed, RingWriter

_encode_into = msgpack.Encoder().encode_into

log = structlog.get_logger("evenflow.control")

#: Bytes that wait while the ring is full, at most: past that the journal ends, the server goes on.
_MOST_WAITING = 64 << 20
#: Bytes that the writer is told of at once.
_UNTOLD = CAPACITY >> 2
#: Seconds that the writer gets for the rest when the control process ends. It goes on by itself after that.
_PATIENCE_S = 5.0


def writer_command(path: str, most: int, log_level: str) -> list[str]:
    """Starts the writer of ``path`` and the file before it, which take at most ``most`` bytes."""
    module = [sys.executable, "-P", "-m", "evenflow.control.journal"]
    return [*module, path, "--size", str(most), "--log-level", log_level]


class JournalLink:
    """Starts the writer by ``command``, to which the descriptors of the ring are added. It ends by itself when this
    process does, however that ends, and writes the rest first."""

    def __init__(self, command: list[str]) -> None:
        memory = os.memfd_create("evenflow journal", os.MFD_CLOEXEC)
        hears, told = os.pipe()
        heard, tells = os.pipe()
        self._ring = RingWriter(memory, told, heard)
        self._waiting: deque[bytes] = deque()
        self._data = bytearray()  #: kept, so that its memory is at hand
        self._bytes = 0
        self.lost = False  #: the journal has ended before its time
        self._process = subprocess.Popen(
            [*command, "--ring", *map(str, (memory, hears, tells))],
            stdin=subprocess.DEVNULL,
            pass_fds=(memory, hears, tells),
            start_new_session=True,
        )
        for descriptor in (memory, hears, tells):
            os.close(descriptor)

    def hand(self, items: list[Item], soon: bool) -> None:
        """Give ``items`` to the writer, without waiting for it. It hears of them when they are wanted ``soon``, or
        are many: to wake it each time would cost more than all else."""
        if self.lost:
            return
        waiting, ring = self._waiting, self._ring
        try:
            while waiting and ring.put(waiting[0]):
                self._bytes -= len(waiting.popleft())
            if items:
                data = self._data
                _encode_into(items, data)
                if waiting or not ring.put(data):
                    waiting.append(bytes(data))
                    self._bytes += len(data)
            if soon or waiting or ring.untold > _UNTOLD:
                ring.tell()
        except RingClosed:
            self._lose("its writer has ended")
        if self._bytes > _MOST_WAITING:
            self._lose("its writer does not keep up")

    def _lose(self, reason: str) -> None:
        self.lost = True
        self._waiting.clear()
        self._bytes = 0
        log.error("the journal ends, the server goes on", reason=reason)

    def close(self) -> None:
        """Everything has been handed over."""
        with contextlib.suppress(RingClosed):
            while self._waiting and self._ring.put(self._waiting[0]):
                self._waiting.popleft()
            self._ring.tell()
        self._ring.close()
        try:
            self._process.wait(_PATIENCE_S)
        except subprocess.TimeoutExpired:
            log.warning("the journal is still being written", pid=self._process.pid)
