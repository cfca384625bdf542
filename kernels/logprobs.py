"""Log-probabilities of given tokens, their ranks, and the best tokens of a row: log-softmax of raw logits.

Each row is computed on its own, so a value does not depend on the batch. The whole log-softmax is never made: a row
costs one sum of exponentials, one count, and a small sort for its best tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]
UInt32 = NDArray[np.uint32]

#: Ids looked at together when the best are sought.
_BLOCK = 64


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of n tokens, each under its own row: log-probability, rank (1 = most likely), and the row's k best.

    Equal logits rank by id, the lowest first. A row with no distribution (its largest logit, NaN left out, is not
    finite) gives -inf for all its tokens.
    """

    values: Float32
    ranks: UInt32
    #: [n, k], best first.
    top_ids: UInt32
    top_values: Float32


def logprobs(logits: Float32, tokens: Int64, best: int) -> TokenLogprobs:
    """Log-probabilities of ``tokens`` (int64[n]) under the rows of ``logits`` (float32[n, V]), with the ``best`` best
    of each row, at most V."""
    count, vocabulary = logits.shape
    best = min(best, vocabulary)
    found = TokenLogprobs(
        values=np.empty(count, np.float32),
        ranks=np.empty(count, np.uint32),
        top_ids=np.empty((count, best), np.uint32),
        top_values=np.empty((count, best), np.float32),
    )
    for number, token in enumerate(tokens.tolist()):
        row = logits[number]
        top = row.max()
        if np.isnan(top):
            # A NaN is no more likely than -inf; it ranks after what is a number.
            row = np.where(np.isnan(row), np.float32(-np.inf), row)
            top = row.max()
        value = row[token]
        found.ranks[number] = 1 + np.count_nonzero(row > value) + np.count_nonzero(row[:token] == value)
        ids = _best(row, best)
        found.top_ids[number] = ids
        if np.isfinite(top):
            shifted = row - top
            mass = float(np.exp(shifted, out=shifted).sum(dtype=np.float64))
            scale = float(top) + np.log(mass)
            found.values[number] = float(value) - scale
            found.top_values[number] = row[ids] - scale
        else:
            found.values[number] = -np.inf
            found.top_values[number] = -np.inf
    return found


def _best(row: Float32, count: int) -> Int64:
    """The ids of the ``count`` largest, in order."""
    if not count:
        return np.empty(0, np.int64)
    whole = len(row) // _BLOCK
    bound = np.float32(-np.inf)
    if whole > count:
        # At least ``count`` blocks have a logit that is no less than this.
        peaks = row[: whole * _BLOCK].reshape(_BLOCK, whole).max(axis=0)
        bound = np.partition(peaks, whole - count)[whole - count]
    ids = np.flatnonzero(row >= bound)
    return ids[np.argsort(-row[ids], kind="stable")[:count]]
