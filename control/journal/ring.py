"""A ring of bytes in shared memory, from the control process to the one that writes its journal.

A message costs the sender one copy. Two pipes beside it tell how far the ring has been written and read, as bytes
since the start (u64 little-endian); so either side notices the other's end, and what was written before it is not
lost. A message is one piece or more, each its length (u32) and its data; ``_MORE`` is added to the length of each but
the last. Where a piece would not fit before the end of the ring, ``_SKIP`` says that it begins at the start.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import struct
from collections.abc import Iterator

CAPACITY = 32 << 20
_LENGTH = struct.Struct("<I")
_PLACE = struct.Struct("<Q")
_SKIP = 0xFFFFFFFF
_MORE = 1 << 31


class RingClosed(Exception):
    """The other side is gone."""


class RingWriter:
    """``memory``, ``told`` (written to) and ``heard`` (read from) are descriptors that it owns."""

    def __init__(self, memory: int, told: int, heard: int, capacity: int = CAPACITY) -> None:
        os.ftruncate(memory, capacity)
        # Populated at once: a fault for each page would be the dearest part of a message.
        self._map = mmap.mmap(memory, capacity, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._capacity = capacity
        self._told, self._heard = told, heard
        os.set_blocking(told, False)
        os.set_blocking(heard, False)
        self._written = 0
        self._last = 0  #: how far the other side was told of
        self._read = 0
        #: Bytes of a piece at most: wherever it is to begin, it fits as soon as most of the ring has been read.
        self.most = (capacity >> 2) - _LENGTH.size

    @property
    def untold(self) -> int:
        """Bytes that the other side does not know of."""
        return self._written - self._last

    def put(self, data: bytes | bytearray, more: bool = False) -> bool:
        """Copy a piece of at most ``most`` bytes in, to which there is ``more``, or the last; False if there is no
        room for it now. Raises ``RingClosed``."""
        size = _LENGTH.size + len(data)
        at = self._written % self._capacity
        skip = self._capacity - at if at + size > self._capacity else 0
        if self._written + skip + size - self._read > self._capacity:
            self._hear()
            if self._written + skip + size - self._read > self._capacity:
                return False
        if skip:
            if skip >= _LENGTH.size:
                _LENGTH.pack_into(self._map, at, _SKIP)
            at = 0
        _LENGTH.pack_into(self._map, at, len(data) | _MORE if more else len(data))
        self._map[at + _LENGTH.size : at + size] = data
        self._written += skip + size
        return True

    def wait(self, timeout: float) -> None:
        """Until the other side has read more, or has ended, or ``timeout`` seconds have passed."""
        select.select([self._heard], [], [], timeout)

    def tell(self) -> None:
        """Let the other side know of what was put. Raises ``RingClosed``."""
        if self._written == self._last:
            return
        try:
            os.write(self._told, _PLACE.pack(self._written))
            self._last = self._written
        except BlockingIOError:
            pass  # so much is still to be heard there that the next word will do
        except BrokenPipeError:
            raise RingClosed from None

    def _hear(self) -> None:
        try:
            heard = os.read(self._heard, 1 << 16)
        except BlockingIOError:
            return
        if not heard:
            raise RingClosed
        if len(heard) >= _PLACE.size:
            # Each word is written at once, so a pipe never holds a part of one.
            (self._read,) = _PLACE.unpack(heard[-_PLACE.size :])

    def close(self) -> None:
        os.close(self._told)
        os.close(self._heard)
        self._map.close()


class RingReader:
    """The other side: ``heard`` is read from, ``told`` written to."""

    def __init__(self, memory: int, heard: int, told: int) -> None:
        self._capacity = os.fstat(memory).st_size
        self._map = mmap.mmap(memory, self._capacity)
        self._heard, self._told = heard, told
        self._read = 0
        self._last = 0  #: how far the other side was told of
        self._pieces: list[bytes] = []  #: of a message whose last piece has not come

    def messages(self, timeout: float) -> Iterator[bytes]:
        """What has come, after waiting up to ``timeout`` seconds for it. Raises ``RingClosed`` when all has been read
        and nothing more will come."""
        if not select.select([self._heard], [], [], timeout)[0]:
            return
        heard = os.read(self._heard, 1 << 16)
        if not heard:
            raise RingClosed
        (written,) = _PLACE.unpack(heard[-_PLACE.size :])
        while self._read < written:
            at = self._read % self._capacity
            left = self._capacity - at
            length = _LENGTH.unpack_from(self._map, at)[0] if left >= _LENGTH.size else _SKIP
            if length == _SKIP:
                self._read += left
                continue
            more = length & _MORE
            length &= ~_MORE
            piece = self._map[at + _LENGTH.size : at + _LENGTH.size + length]
            if more or self._pieces:
                self._pieces.append(piece)
            if not more:
                if self._pieces:
                    piece = b"".join(self._pieces)
                    self._pieces.clear()
                yield piece
            self._read += _LENGTH.size + length
            if self._read - self._last >= self._capacity >> 4:
                # Rarely: the other side reads these words only when the ring looks full, and then all of them.
                self._last = self._read
                with contextlib.suppress(BrokenPipeError):
                    os.write(self._told, _PLACE.pack(self._read))
