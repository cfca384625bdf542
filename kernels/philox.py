"""Philox4x32-10, the counter-based generator of Salmon et al. (SC'11): bits as a pure function of key and counter.

Every backend must give these very bits, so that a sequence samples the same tokens wherever it runs.
"""

import numpy as np
from numpy.typing import NDArray

UInt32 = NDArray[np.uint32]
UInt64 = NDArray[np.uint64]
Counter = tuple[UInt64, UInt64, UInt64, UInt64]

_MULTIPLIERS = (np.uint64(0xD2511F53), np.uint64(0xCD9E8D57))
_WEYL = (np.uint64(0x9E3779B9), np.uint64(0xBB67AE85))
_ROUNDS = 10
_LOW, _SHIFT = np.uint64(0xFFFFFFFF), np.uint64(32)


def philox4x32(counter: Counter, key: UInt64) -> UInt32:
    """Four words of each counter under its key: uint32[4, *shape], where ``shape`` is that of all parts together.

    The low 32 bits of each part count; keys have 64. A key that many counters share need not be repeated: with a
    shape of [n, 1] its round keys are computed n times.
    """
    shape = np.broadcast_shapes(*(part.shape for part in counter), key.shape)
    words = np.empty((4, *shape), np.uint64)
    for number, part in enumerate(counter):
        words[number] = part & _LOW
    c0, c1, c2, c3 = words[0], words[1], words[2], words[3]
    k0, k1 = key & _LOW, key >> _SHIFT
    product0, product1 = np.empty_like(c0), np.empty_like(c0)
    for _ in range(_ROUNDS):
        np.multiply(c0, _MULTIPLIERS[0], out=product0)
        np.multiply(c2, _MULTIPLIERS[1], out=product1)
        # New words: hi(product1)^c1^k0, lo(product1), hi(product0)^c3^k1, lo(product0).
        np.right_shift(product1, _SHIFT, out=c0)
        c0 ^= c1
        c0 ^= k0
        np.right_shift(product0, _SHIFT, out=c2)
        c2 ^= c3
        c2 ^= k1
        np.bitwise_and(product1, _LOW, out=c1)
        np.bitwise_and(product0, _LOW, out=c3)
        k0, k1 = (k0 + _WEYL[0]) & _LOW, (k1 + _WEYL[1]) & _LOW
    return words.astype(np.uint32)
