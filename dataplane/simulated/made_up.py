"""Log-probabilities that a runner without a model makes up of one hash a token: the same hash, the same values."""

import numpy as np
from numpy.typing import NDArray

from ...control.wire import Logprobs

#: Log-probability, rank, and the best tokens with theirs.
Row = tuple[float, int, tuple[tuple[int, float], ...]]


def made_up_row(word: int, best: int, vocab_size: int) -> Row:
    """What is made of one hash. Float32 holds the values exactly."""
    value = -1.0 - (word >> 48) / 65536
    top = tuple(((word + place) % vocab_size, value + 1.0 - place) for place in range(best))
    return value, 1 + word % 256, top


def made_up_logprobs(slot: int, start: int, words: NDArray[np.uint64], best: int, vocab_size: int) -> Logprobs:
    """A report of as many tokens as there are hashes."""
    rows = [made_up_row(word, best, vocab_size) for word in words.tolist()]
    return Logprobs(
        slot=slot,
        start=start,
        values=np.array([value for value, _, _ in rows], "<f4").tobytes(),
        ranks=np.array([rank for _, rank, _ in rows], "<u4").tobytes(),
        top_ids=np.array([token for _, _, top in rows for token, _ in top], "<u4").tobytes(),
        top_values=np.array([value for _, _, top in rows for _, value in top], "<f4").tobytes(),
    )
