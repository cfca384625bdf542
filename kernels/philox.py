"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11): bits as a pure function of key and counter.

Every backend must give these very bits, so that a sequence samples the same tokens wherever it runs.
"""

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
_UInt64 = NDArray[np.uint64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)
#: Counters computed together: six arrays of this length stay in the second-level cache.
_PIECE = 8192


def philox4x32(first: UInt32, rest: tuple[int, int, int], key: int) -> UInt32:
    """Four words for each counter (``first[i]``, *rest) under the 64-bit ``key``: uint32[n, 4]."""
    words = np.empty((len(first), 4), np.uint32)
    for begin in range(0, len(first), _PIECE):
        words[begin : begin + _PIECE] = _piece(first[begin : begin + _PIECE], rest, key)
    return words


def _piece(first: UInt32, rest: tuple[int, int, int], key: int) -> UInt32:
    c0: _UInt64 = first.astype(np.uint64)
    c1, c2, c3 = (np.full(len(first), word & 0xFFFFFFFF, np.uint64) for word in rest)
    k0, k1 = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        # New words: hi(product1)^c1^k0, lo(product1), hi(product0)^c3^k1, lo(product0).
        np.right_shift(product1, _SHIFT, out=c0)
        c0 ^= c1
        c0 ^= np.uint64(k0)
        np.right_shift(product0, _SHIFT, out=c2)
        c2 ^= c3
        c2 ^= np.uint64(k1)
        np.bitwise_and(product1, _LOW, out=c1)
        np.bitwise_and(product0, _LOW, out=c3)
        k0, k1 = (k0 + _WEYL[0]) & 0xFFFFFFFF, (k1 + _WEYL[1]) & 0xFFFFFFFF
    return np.stack((c0, c1, c2, c3), axis=1).astype(np.uint32)
