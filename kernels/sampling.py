"""Choosing the next token: greedy, or temperature → top-k → top-p → a draw.

Each row is computed on its own from its logits, parameters and (seed, position, sample index), so its token depends
neither on the batch nor on when or where the row runs. The draw is by the Gumbel-max rule: the kept token with the
largest ``logit / temperature + g(token)``, where g comes from Philox with the counter (token id, position, sample
index, 0) under the seed.

Ties: greedy takes the lowest id; top-k and top-p keep every token that equals the last one kept.
"""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .philox import philox4x32

Float64 = NDArray[np.float64]
Int64 = NDArray[np.int64]

#: The largest value of ``gumbel``, rounded up: -log(-log1p(-2**-33)).
_GUMBEL_MAX = 22.88
#: Candidates looked at before falling back to the whole vocabulary.
_HEAD = 1024


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One row's parameters. ``temperature`` 0 is greedy; ``top_k`` <= 0 and ``top_p`` >= 1 are off."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    index: int = 0
    position: int = 0


def sample(logits: Tensor, params: list[SamplingParams]) -> Int64:
    """One token id for each row of ``logits`` (float32[S, V])."""
    ids = torch.argmax(logits, dim=-1).numpy()
    for row, wanted in enumerate(params):
        if wanted.temperature > 0.0:
            ids[row] = _draw(logits[row], wanted)
    return ids


def gumbel(tokens: Int64, params: SamplingParams) -> Float64:
    """Standard Gumbel noise of these token ids for this row."""
    words = philox4x32(tokens.astype(np.uint32), (params.position, params.index, 0), params.seed)[:, 0]
    uniform = (words.astype(np.float64) + 0.5) * 2.0**-32
    return -np.log(-np.log1p(-uniform))


def _draw(logits: Tensor, params: SamplingParams) -> int:
    vocabulary = len(logits)
    head = torch.topk(logits, min(_HEAD, vocabulary)).values.numpy().astype(np.float64)
    if not np.isfinite(head[0]):
        return int(torch.argmax(logits))
    # Relative to the largest, in float64: no temperature, however small, makes this overflow into NaN.
    raw = logits.numpy().astype(np.float64)
    with np.errstate(over="ignore"):
        scaled = (raw - head[0]) / params.temperature
        head = (head - head[0]) / params.temperature
    floor = -np.inf
    if 0 < params.top_k < vocabulary:
        floor = head[params.top_k - 1] if params.top_k <= len(head) else np.sort(scaled)[-params.top_k]
    if params.top_p < 1.0:
        floor = max(floor, _nucleus_floor(scaled, head, floor, params.top_p))
    if floor > head[-1]:
        kept = np.flatnonzero(scaled >= floor)
    else:
        # Noise only for tokens that can still win: those within the largest noise of the best of the head.
        best = np.flatnonzero(scaled >= max(floor, head[min(63, len(head) - 1)]))
        bar = float(np.max(scaled[best] + gumbel(best, params))) - _GUMBEL_MAX
        kept = np.flatnonzero(scaled >= max(floor, bar))
    return int(kept[np.argmax(scaled[kept] + gumbel(kept, params))])


def _nucleus_floor(scaled: Float64, head: Float64, floor: float, top_p: float) -> float:
    """The value of the last token in the smallest set, in descending order, that holds ``top_p`` of the mass."""
    total = float(np.exp(scaled[scaled >= floor]).sum())
    for descending in (head, None):
        values = np.sort(scaled)[::-1] if descending is None else descending
        values = values[values >= floor]
        mass = np.cumsum(np.exp(values))
        last = int(np.searchsorted(mass, top_p * total))
        if last < len(values):
            return float(values[last])
    return floor
