"""Little-endian buffers of integers, as the wire has them. ``struct`` is several times faster here than ``array``."""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct

_CACHED = 257
_U16 = [Struct(f"<{n}H") for n in range(_CACHED)]
_U32 = [Struct(f"<{n}I") for n in range(_CACHED)]
#: Most buffers of a plan have one entry or none.
_ONE_U16, _ONE_U32, _ONE_U64 = Struct("<H").pack, Struct("<I").pack, Struct("<Q").pack


def pack_u16(values: Collection[int]) -> bytes:
    """``values`` as u16s, in their order."""
    count = len(values)
    if count > 1:
        return (_U16[count] if count < _CACHED else Struct(f"<{count}H")).pack(*values)
    for value in values:
        return _ONE_U16(value)
    return b""


def pack_u32(values: Collection[int]) -> bytes:
    """``values`` as u32s, in their order."""
    count = len(values)
    if count > 1:
        return (_U32[count] if count < _CACHED else Struct(f"<{count}I")).pack(*values)
    for value in values:
        return _ONE_U32(value)
    return b""


def pack_u64(values: Collection[int]) -> bytes:
    """``values`` as u64s, in their order."""
    count = len(values)
    if count > 1:
        return Struct(f"<{count}Q").pack(*values)
    for value in values:
        return _ONE_U64(value)
    return b""


def span(live: bytearray) -> int:
    """One more than the highest live slot."""
    used = live.rstrip(b"\0")
    return (len(used) << 3) - 8 + used[-1].bit_length() if used else 0


def bits(bitmap: bytes) -> list[int]:
    """The slots of a bitmap, ascending."""
    value = int.from_bytes(bitmap, "little")
    return [i for i, bit in enumerate(reversed(bin(value)[2:])) if bit == "1"] if value else []
