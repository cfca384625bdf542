"""What a request changes in a row of logits before its token is chosen, in this order: biases, the repetition
penalty, the presence and frequency penalties, and tokens that may not come (stop ids before the minimum length).

Each touches only the ids it is about, so a row costs what its request names and has seen, not the vocabulary.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Float32 = NDArray[np.float32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bias:
    """``values[i]`` is added to the logit of ``ids[i]``; ids are unique."""

    ids: Int64
    values: Float32


@dataclass(frozen=True, slots=True)
class Penalties:
    """``repetition`` divides the positive and multiplies the negative logits of ``seen``, the unique ids of prompt
    and output (1 is off). ``presence`` is subtracted once where an id of ``seen`` occurs in the output, ``frequency``
    as often as it occurs there (``counts``); 0 is off.
    """

    seen: Int64
    counts: Int64
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0


@dataclass(frozen=True, slots=True)
class Adjustments:
    """One row's changes. Ids outside the vocabulary count for nothing."""

    bias: Bias | None = None
    penalties: Penalties | None = None
    forbidden: Int64 | None = None


def adjust(row: Float32, changes: Adjustments) -> None:
    """Change ``row`` (float32[V]) in place, in float32."""
    size = len(row)
    if (bias := changes.bias) is not None:
        inside = bias.ids < size
        row[bias.ids[inside]] += bias.values[inside]
    if (penalties := changes.penalties) is not None:
        inside = penalties.seen < size
        seen, counts = penalties.seen[inside], penalties.counts[inside]
        logits = row[seen]
        if penalties.repetition != 1.0:
            factor = np.float32(penalties.repetition)
            logits = np.where(logits > 0, logits / factor, logits * factor)
        logits -= np.float32(penalties.presence) * (counts > 0).astype(np.float32)
        logits -= np.float32(penalties.frequency) * counts.astype(np.float32)
        row[seen] = logits
    if (forbidden := changes.forbidden) is not None:
        row[forbidden[forbidden < size]] = -np.inf
