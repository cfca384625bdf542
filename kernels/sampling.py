"""Choosing the next token: greedy, or temperature → top-k → top-p → min-p → a draw.

Each row is computed on its own from its logits, parameters and (seed, position, sample index), so its token depends
neither on the batch nor on when or where the row runs. The draw is by the Gumbel-max rule: the kept token with the
largest ``logit / temperature + noise(token)`` (``noise``). Filters are thresholds on logits; what they need of a
row's best tokens comes from a sorted *head* of some hundred tokens, or from the whole row where that is too short.

Ties: greedy takes the lowest id; top-k and top-p keep every token that equals the last one kept. A row whose largest
logit is not finite (or that holds NaN) has no distribution: it takes the first NaN, else the first of the largest.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .noise import BLOCK, LARGEST, Int64, Keys, block_minima, exponentials

Float32 = NDArray[np.float32]

#: Blocks whose largest logits bound the head from below: it has at least as many tokens.
_HEAD = 256
#: Blocks of noise made together: the generator's arrays stay in the second-level cache.
_GROUP = 16_384
#: Below any noise: the least of a block and an exponential of its own, both at their largest.
_LEAST_NOISE = -float(np.log(LARGEST / BLOCK + LARGEST)) - 0.01


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One row's draw. ``top_k`` <= 0, ``top_p`` >= 1 and ``min_p`` <= 0 are off; ``temperature`` > 0.

    ``position`` is the index of the drawn token in its sequence.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    index: int = 0
    position: int = 0


def sample(logits: Tensor, drawn: Mapping[int, SamplingParams]) -> Int64:
    """One token id for each row of ``logits`` (float32[S, V], contiguous); rows not in ``drawn`` are greedy."""
    values = logits.numpy()
    # Many times faster than torch's on a CPU, and said to take the first of equals.
    ids = values.argmax(axis=1).astype(np.int64)
    if not drawn:
        return ids
    best = values[np.arange(len(ids)), ids]
    rows = np.array([row for row in sorted(drawn) if np.isfinite(best[row])], np.int64)
    if not len(rows):
        return ids
    vocabulary = logits.shape[1]
    padding = -vocabulary % BLOCK
    if padding:
        logits = torch.nn.functional.pad(logits, (0, padding), value=-torch.inf)
    blocked = logits.view(len(ids), -1, BLOCK)
    peaks = torch.amax(blocked, dim=-1).numpy()
    group = max(1, _GROUP // blocked.shape[1])
    for begin in range(0, len(rows), group):
        part = rows[begin : begin + group]
        params = [drawn[row] for row in part.tolist()]
        floors = [
            _floor(values[row], peaks[row], float(best[row]), own) for row, own in zip(part, params, strict=True)
        ]
        ids[part] = _draw(blocked.numpy(), peaks, part, best[part], np.array(floors, np.float32), params)
    return ids


def keys_of(params: list[SamplingParams]) -> Keys:
    """What the noise of these rows is keyed by."""
    columns = ([p.seed for p in params], [p.position for p in params], [p.index for p in params])
    return Keys(*(np.array(column, np.uint64) for column in columns))


def _draw(
    blocked: Float32, peaks: Float32, rows: Int64, best: Float32, floors: Float32, params: list[SamplingParams]
) -> Int64:
    """The token of each of ``rows``: the one with the largest sum of scaled logit and noise at or above its floor.

    A block's sum is bounded by its largest logit and its largest noise. The bar that a block must reach is the
    largest of sums that are known to be reached: that of each block's token with the largest noise, and the best
    logit with the least noise there is.
    """
    count, blocks = len(rows), peaks.shape[1]
    # Relative to the largest, in float64: no temperature, however small, makes this overflow into NaN.
    top = best.astype(np.float64)[:, None]
    temperature = np.array([p.temperature for p in params])[:, None]
    keys = keys_of(params)
    least, place = block_minima(keys, blocks)
    noise = -np.log(least)
    high = peaks[rows]
    loud = blocked[rows[:, None], np.arange(blocks), place]
    with np.errstate(over="ignore"):
        reached = (loud - top) / temperature + noise
        bounds = (high - top) / temperature + noise
    reached[loud < floors[:, None]] = _LEAST_NOISE
    bars = np.maximum(reached.max(axis=1), _LEAST_NOISE)
    row, block = np.nonzero((bounds >= bars[:, None]) & (high >= floors[:, None]))
    # The tokens of these blocks that can still win.
    logits = blocked[rows[row], block]
    with np.errstate(over="ignore"):
        scaled = (logits - top[row]) / temperature[row]
    candidate, token = np.nonzero(
        (logits >= floors[row, None]) & (scaled + noise[row, block][:, None] >= bars[row, None])
    )
    scaled, row, block = scaled[candidate, token], row[candidate], block[candidate]
    ids = block * BLOCK + token
    exponential = least[row, block]
    exponential += np.where(token == place[row, block], 0.0, exponentials(keys.take(row), ids))
    total = scaled - np.log(exponential)
    ends = np.searchsorted(row, np.arange(1, count + 1))
    begins = np.concatenate(([0], ends[:-1]))
    return np.array([ids[a + total[a:b].argmax()] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)])


def _floor(row: Float32, peaks: Float32, best: float, params: SamplingParams) -> np.float32:
    """The least logit that the filters keep."""
    floor = np.float32(-np.inf)
    by_rank, by_mass = 0 < params.top_k < len(row), params.top_p < 1.0
    if by_rank or by_mass:
        head = _head(row, peaks)
        if by_rank:
            if params.top_k > len(head):
                head = np.sort(row)[::-1]
            floor = head[params.top_k - 1]
        if by_mass:
            floor = _nucleus_floor(row, head, floor, best, params)
    if params.min_p > 0.0:
        floor = max(floor, _at_least(best + params.temperature * float(np.log(params.min_p))))
    return floor


def _head(row: Float32, peaks: Float32) -> Float32:
    """The largest logits of the row, in descending order: at least ``_HEAD`` of them, or all."""
    if len(peaks) <= _HEAD:
        return np.sort(row)[::-1]
    bound = np.partition(peaks, len(peaks) - _HEAD)[len(peaks) - _HEAD]
    # Where many are equal to the bound, what is left out of them would be in no order: all are taken.
    return _descending(row, bound)


def _descending(row: Float32, bound: np.float32) -> Float32:
    """All logits that are not below ``bound``."""
    # Several times faster than a mask as index, where many are taken.
    return np.sort(row.take((row >= bound).nonzero()[0]))[::-1]


def _nucleus_floor(row: Float32, head: Float32, floor: np.float32, best: float, params: SamplingParams) -> np.float32:
    """The last logit of the smallest set, in descending order, that holds ``top_p`` of the mass above ``floor``."""

    def masses(values: Float32) -> Float32:
        with np.errstate(over="ignore", under="ignore"):
            scaled = (values - np.float32(best)) / np.float32(params.temperature)
            return np.exp(scaled, out=scaled)

    if floor > -np.inf:
        # Above a rank, all that counts is in the head.
        head = head[head >= floor]
        whole = masses(head)
    else:
        whole = masses(row)
    total = float(whole.sum(dtype=np.float64))
    for _ in range(2):
        mass = np.cumsum(masses(head).astype(np.float64))
        last = int(np.searchsorted(mass, params.top_p * total))
        if last < len(head):
            return head[last]
        if floor > -np.inf:
            break
        # Tokens with less than an even share of the mass that may be missing are missing, whatever the others are;
        # half of that, so that rounding does not matter.
        share = 0.5 * (1.0 - params.top_p) * total / len(row)
        head = _descending(row, np.float32(best + params.temperature * float(np.log(share))))
    # What rounding left over.
    return floor


def _at_least(value: float) -> np.float32:
    """The smallest float32 that is not below ``value``."""
    with np.errstate(over="ignore"):
        rounded = np.float32(value)
    return rounded if float(rounded) >= value else np.nextafter(rounded, np.float32(np.inf))
