"""Gumbel noise of token ids, made so that the largest of each block of ids is known before the others.

The noise of an id is -log(e) with e exponential of rate 1, and depends on (seed, position, sample index, id) alone.
Ids come in blocks of 64. The least e of a block is itself exponential, with rate 64; the id that has it is any of the
64; and each of the others is that least one plus an exponential of its own, since the exponential forgets. Made in
this order the noise has the distribution that it has when made one id after the other, but whoever looks for the
best id of a vocabulary needs the blocks' largest noises only, and those of single ids where a block can still win.

Two blocks share a counter: (block // 2, position, index, 1). Ids have (id, position, index, 0).
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .philox import UInt32, UInt64, philox4x32

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

#: Ids in a block.
BLOCK = 64
#: No exponential is larger: -log(2**-33), rounded up.
LARGEST = 22.88


@dataclass(frozen=True, slots=True)
class Keys:
    """What the noise of n rows depends on, besides ids: uint64[n] each. Indices and positions count modulo 2**32."""

    seed: UInt64
    position: UInt64
    index: UInt64

    def __len__(self) -> int:
        return len(self.seed)

    def take(self, rows: Int64) -> "Keys":
        return Keys(self.seed[rows], self.position[rows], self.index[rows])


def block_minima(keys: Keys, blocks: int) -> tuple[Float64, Int64]:
    """Of blocks 0 .. ``blocks``-1 of each row: the least exponential, and the place in the block that has it.

    Both have the shape [rows, blocks].
    """
    pairs = np.arange(-(-blocks // 2), dtype=np.uint64)
    words = _words(keys.seed[:, None], pairs, keys.position[:, None], keys.index[:, None], 1)
    # [2 (exponential, place), rows, pairs, 2 (even, odd block)]
    words = words.reshape(2, 2, len(keys), len(pairs)).transpose(1, 2, 3, 0)
    least, place = words.reshape(2, len(keys), 2 * len(pairs))[:, :, :blocks]
    return _exponential(least) / BLOCK, (place % BLOCK).astype(np.int64)


def exponentials(keys: Keys, ids: Int64) -> Float64:
    """Of one id in each row: what it has beyond the least of its block, unless it is that one."""
    return _exponential(_words(keys.seed, ids.astype(np.uint64), keys.position, keys.index, 0)[0])


def gumbel(keys: Keys, ids: Int64) -> Float64:
    """The noise of these ids in each row, [rows, ids]: the definition, for tests and small sets."""
    least, place = (array[:, ids // BLOCK] for array in block_minima(keys, int(ids.max()) // BLOCK + 1))
    wide = keys.take(np.repeat(np.arange(len(keys)), len(ids)))
    own = exponentials(wide, np.tile(ids, len(keys))).reshape(least.shape)
    return -np.log(np.where(place == ids % BLOCK, least, least + own))


def _words(seed: UInt64, first: UInt64, position: UInt64, index: UInt64, last: int) -> UInt32:
    return philox4x32((first, position, index, np.full(1, last, np.uint64)), seed)


def _exponential(words: UInt32) -> Float64:
    """Never 0, at most ``LARGEST``."""
    return -np.log((words + 0.5) * 2.0**-32)
