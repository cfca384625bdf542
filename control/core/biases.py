"""The biases of a submission, checked where it is taken: a worker only sees ids that the model has."""

from __future__ import annotations

from math import isfinite

from ..wire import MAX_BIASES, Sampling

#: Largest absolute value of a bias.
MAX_BIAS = 100.0


def bias_problem(sampling: Sampling, vocab_size: int) -> tuple[str, str, str] | None:
    """Why they are refused: code, field and message."""
    ids, values = sampling.bias_ids, sampling.bias_values
    if len(ids) & 3 or len(ids) != len(values):
        text = f"bias_ids and bias_values must be as many u32 and f32, not {len(ids)} and {len(values)} bytes"
        return "invalid", "bias_values", text
    named = memoryview(ids).cast("I")
    if len(named) > MAX_BIASES:
        return "invalid", "bias_ids", f"bias_ids may have at most {MAX_BIASES} entries, not {len(named)}"
    if (most := max(named)) >= vocab_size:
        return "invalid", "bias_ids", f"bias_ids must be token ids from 0 to {vocab_size - 1}, not {most}"
    if len(set(named)) < len(named):
        return "invalid", "bias_ids", "bias_ids must name each token once"
    for value in memoryview(values).cast("f"):
        if not isfinite(value) or abs(value) > MAX_BIAS:
            return "invalid", "bias_values", f"bias_values must be from -{MAX_BIAS:g} to {MAX_BIAS:g}, not {value:g}"
    return None
