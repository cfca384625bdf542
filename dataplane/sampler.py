"""The end of the last stage on the CPU: from logits to tokens and their log-probabilities.

Called by ``model_runner`` once an iteration. Rows that ask for nothing but a token cost nothing else.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..control.wire import Logprobs
from ..kernels.logits import Adjustments, Bias, Penalties, adjust
from ..kernels.logprobs import TokenLogprobs, logprobs
from ..kernels.sampling import SamplingParams, sample
from .batch import Int64, SamplingRows
from .extras import PromptTokens, RowExtras

#: Prompt positions whose logits are in memory together.
SLICE = 64


def choose(logits: Tensor, rows: SamplingRows, slots: Int64) -> tuple[Int64, list[Logprobs]]:
    """One id for each row of ``logits`` (float32[S, V], which is changed), and what is reported of some of them.

    ``slots``: whose the rows are.
    """
    values = logits.numpy()
    raw: dict[int, np.ndarray] = {}
    for row, extras in rows.extras.items():
        changes = _adjustments(extras)
        if extras.logprobs >= 0:
            raw[row] = values[row : row + 1] if changes is None else values[row : row + 1].copy()
        if changes is not None:
            adjust(values[row], changes)
    ids = sample(logits, _drawn(rows))
    found: list[Logprobs] = []
    for row, unchanged in raw.items():
        of_token = logprobs(unchanged, ids[row : row + 1], rows.extras[row].logprobs)
        found.append(message(int(slots[row]), int(rows.position[row]), [of_token]))
    return ids, found


def prompt_logprobs(prompts: Sequence[PromptTokens], logits: Callable[[Tensor], Tensor]) -> list[Logprobs]:
    """One report for each of ``prompts``.

    ``logits`` computes those of a few of the batch's tokens, whose numbers it is given: int64[n] to float32[n, V].
    """
    found: list[Logprobs] = []
    for prompt in prompts:
        parts: list[TokenLogprobs] = []
        for begin in range(0, len(prompt.tokens), SLICE):
            tokens = prompt.tokens[begin : begin + SLICE]
            first = prompt.first + begin
            rows = logits(torch.arange(first, first + len(tokens))).numpy()
            parts.append(logprobs(rows, tokens, prompt.best))
        found.append(message(prompt.slot, prompt.start, parts))
    return found


def message(slot: int, start: int, parts: Sequence[TokenLogprobs]) -> Logprobs:
    """The report of ``parts``, which follow each other from index ``start`` of the sequence on."""
    return Logprobs(
        slot=slot,
        start=start,
        values=b"".join(part.values.tobytes() for part in parts),
        ranks=b"".join(part.ranks.tobytes() for part in parts),
        top_ids=b"".join(part.top_ids.tobytes() for part in parts),
        top_values=b"".join(part.top_values.tobytes() for part in parts),
    )


def _adjustments(extras: RowExtras) -> Adjustments | None:
    history = extras.history
    if extras.bias is None and history is None and extras.forbidden is None:
        return None
    penalties = None
    if history is not None:
        penalties = Penalties(history.ids, history.counts, extras.repetition, extras.presence, extras.frequency)
    return Adjustments(None if extras.bias is None else Bias(*extras.bias), penalties, extras.forbidden)


def _drawn(rows: SamplingRows) -> dict[int, SamplingParams]:
    """Parameters of the rows that are not greedy."""
    drawn = (rows.temperature > 0.0).nonzero()[0]
    if not len(drawn):
        return {}
    columns = (rows.temperature, rows.top_k, rows.top_p, rows.min_p, rows.seed, rows.index, rows.position)
    values = zip(*(column[drawn].tolist() for column in columns), strict=True)
    return {row: SamplingParams(*of_row) for row, of_row in zip(drawn.tolist(), values, strict=True)}
