"""A journal's file: a head, then frames of records. It may be read from anywhere: all that it claims is checked.

    head:  "evenflow journal", a newline, the version (u16 little-endian)
    frame: length of the data (u32), CRC-32 of the data (u32), data: MessagePack list of records, deflated by zlib

A frame that ends early, or whose sum is wrong, at the very end of a file is what a crash leaves: it is passed over,
and told. Anywhere else it is a fault.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import msgpack

from .records import VERSION, Opening, Record

MAGIC = b"evenflow journal\n"
_HEAD = struct.Struct("<H")
_FRAME = struct.Struct("<II")
#: Bytes of a frame's data, deflated and not, at most: a record is at most as large as a message.
MAX_DEFLATED, MAX_INFLATED = 32 << 20, 64 << 20

_records = msgpack.Decoder(list[Record])
encode = msgpack.Encoder().encode


class JournalError(Exception):
    """The file is no journal, or not one that can be used. The text says where and why."""


def head() -> bytes:
    """The beginning of every file."""
    return MAGIC + _HEAD.pack(VERSION)


def frame(records: list[Record]) -> bytes:
    """``records`` as a frame."""
    data = zlib.compress(encode(records), 1)
    return _FRAME.pack(len(data), zlib.crc32(data)) + data


class JournalFile:
    """The records of a file, in order. ``note`` says, once they have been read, what is missing at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.note = ""
        self.opening: Opening | None = None

    def __iter__(self) -> Iterator[Record]:
        """Raises ``JournalError``."""
        try:
            with self.path.open("rb") as file:
                for data, offset in self._frames(file):
                    for record in self._decode(data, offset):
                        if (self.opening is None) is not isinstance(record, Opening):
                            raise JournalError(f"{self.path}: the opening is not the first record")
                        if isinstance(record, Opening):
                            self.opening = record
                        yield record
        except OSError as error:
            raise JournalError(f"{self.path}: {error.strerror}") from None
        if self.opening is None:
            raise JournalError(f"{self.path}: it ends before its first frame")

    def _frames(self, file: BinaryIO) -> Iterator[tuple[bytes, int]]:
        """Data and place of each frame."""
        start = file.read(len(MAGIC) + _HEAD.size)
        if not start.startswith(MAGIC):
            raise JournalError(f"{self.path} is not a journal of evenflow")
        if len(start) < len(MAGIC) + _HEAD.size:
            raise JournalError(f"{self.path}: it ends before its first frame")
        (version,) = _HEAD.unpack(start[len(MAGIC) :])
        if version != VERSION:
            raise JournalError(f"{self.path}: a journal of version {version}, this program reads {VERSION}")
        size = os.fstat(file.fileno()).st_size
        while True:
            offset = file.tell()
            if offset == size:
                return
            mark = file.read(_FRAME.size)
            length, crc = _FRAME.unpack(mark) if len(mark) == _FRAME.size else (size, 0)
            if offset + _FRAME.size + length > size:
                self.note = f"the last frame, at byte {offset}, is not whole: what it held is lost"
                return
            if length > MAX_DEFLATED:
                raise JournalError(f"{self.path}, byte {offset}: a frame of {length} bytes, at most {MAX_DEFLATED}")
            data = file.read(length)
            if zlib.crc32(data) != crc:
                if file.tell() == size:
                    self.note = f"the last frame, at byte {offset}, is damaged: what it held is lost"
                    return
                raise JournalError(f"{self.path}, byte {offset}: the frame's sum is wrong")
            yield data, offset

    def _decode(self, data: bytes, offset: int) -> list[Record]:
        inflate = zlib.decompressobj()
        try:
            plain = inflate.decompress(data, MAX_INFLATED)
            if not inflate.eof:
                raise JournalError(f"{self.path}, byte {offset}: a frame of more than {MAX_INFLATED} bytes")
            return _records.decode(plain)
        except (zlib.error, msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError) as error:
            raise JournalError(f"{self.path}, byte {offset}: {error}") from None
