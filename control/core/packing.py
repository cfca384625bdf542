"""Little-endian buffers of integers, as the wire has them. ``struct`` is several times faster here than ``array``."""

from __future__ import annotations

from collections.abc import Collection
from struct import Struct

_CACHED = 257
_U16 = [Struct(f"<{n}H") for n in range(_CACHED)]
_U32 = [Struct(f"<{n}I") for n in range(_CACHED)]


def pack_u16(values: Collection[int]) -> bytes:
    """``values`` as u16s, in their order."""
    count = len(values)
    return (_U16[count] if count < _CACHED else Struct(f"<{count}H")).pack(*values)


def pack_u32(values: Collection[int]) -> bytes:
    """``values`` as u32s, in their order."""
    count = len(values)
    return (_U32[count] if count < _CACHED else Struct(f"<{count}I")).pack(*values)
