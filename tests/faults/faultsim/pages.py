"""A shadow KV cache in plain Python: the same ids as ``dataplane.simulated.shadow``, while nothing is wrong.

There a token reads every place before it, here the sums over whole blocks, which is the same for as long as each
block holds what its sequence wrote, in that order. Where it does not, the sum goes wrong for certain.
"""

from evenflow.control.wire import Sampling
from evenflow.dataplane.simulated import shadow

_MASK = (1 << 64) - 1
_M1, _M2, _STEP = shadow._M1, shadow._M2, shadow._STEP
_POISON = shadow._POISON


class Page:
    """What one block holds: places 0 .. len - 1, written as the block number ``order`` of a sequence. ``a`` and ``b``
    are the running sums over its places in the two layers."""

    __slots__ = ("a", "b", "order")

    def __init__(self, order: int) -> None:
        self.order = order
        self.a: list[int] = []
        self.b: list[int] = []


class Pages:
    """The blocks of one stage in one epoch, and what its two layers find in them."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._pages: list[Page | None] = [None] * num_blocks
        self._size = block_size

    def compute(self, table: list[int], place: int, words: list[int], before: list[int] | None) -> list[int]:
        """Write tokens from ``place`` on, and sum over what each of them then sees. A word is an id << 32 and a
        position; ``before`` is what the stage before found, None on the first."""
        pages, size = self._pages, self._size
        order, offset = divmod(place, size)
        base_a = base_b = 0
        for number in range(order):
            page = pages[table[number]]
            if page is not None and page.order == number and len(page.a) == size:
                base_a += page.a[-1]
                base_b += page.b[-1]
            else:
                base_a += _POISON
                base_b += _POISON
        page = pages[table[order]]
        if offset:
            if page is None or page.order != order or len(page.a) < offset:
                page = pages[table[order]] = Page(order)
                page.a = [_POISON] * offset
                page.b = [_POISON] * offset
            del page.a[offset:], page.b[offset:]
            sum_a, sum_b = page.a[-1], page.b[-1]
        else:
            page = pages[table[order]] = Page(order)
            sum_a = sum_b = 0
        found: list[int] = []
        for number, word in enumerate(words):
            if offset == size:
                base_a += sum_a
                base_b += sum_b
                order, offset, sum_a, sum_b = order + 1, 0, 0, 0
                page = pages[table[order]] = Page(order)
            if before is not None and word & 0xFFFFFFFF != place:
                word ^= _POISON
            shift = place * _STEP
            x = word + shift & _MASK
            x ^= x >> 32
            x = x * _M1 & _MASK
            x ^= x >> 29
            x = x * _M2 & _MASK
            sum_a += x ^ x >> 32
            x = base_a + sum_a + shift & _MASK
            x ^= x >> 32
            x = x * _M1 & _MASK
            x ^= x >> 29
            x = x * _M2 & _MASK
            sum_b += x ^ x >> 32
            total = base_b + sum_b & _MASK
            if before is not None and total != before[number]:
                sum_b += _POISON
                total ^= _POISON
            page.a.append(sum_a)
            page.b.append(sum_b)
            found.append(total)
            place += 1
            offset += 1
        return found


def drawn(sampling: Sampling, position: int, state: int, vocab_size: int) -> int:
    """The token at ``position``, given what was found before it."""
    if sampling.temperature > 0:
        noise = sampling.seed * shadow._SEED + sampling.index * shadow._INDEX + position * shadow._PLACE
        state += shadow._mix_int(noise)
    return shadow._mix_int(state) % vocab_size
