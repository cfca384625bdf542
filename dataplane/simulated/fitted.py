"""The cost of iterations as it was measured: a linear model, fitted to all that were seen.

The terms are those of the decision core's own model (``control.core.timing``): a constant, prefill tokens, pairs of
tokens that attention looks at, decodes, KV tokens that they read. Coefficients are not negative, and least squares
are relative, so that a small iteration counts as much as a large one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .cost import Work

#: Rounds of coordinate descent: far more than a few terms need.
_ROUNDS = 2000


class Measured(NamedTuple):
    """An iteration of one stage: its batch, and microseconds."""

    prefill: float
    attention: float
    decodes: float
    kv_tokens: float
    took_us: float


@dataclass(frozen=True, slots=True)
class Residuals:
    """How far the model is from what it was fitted to. Errors are relative to the measured time: the mean of their
    sizes, the size that 50, 90 and 99 of a hundred do not exceed, and ``bias``, by how much all predictions together
    are above all measurements. ``explained``: the share of the variance that the model explains (R²)."""

    iterations: int
    mean: float
    p50: float
    p90: float
    p99: float
    bias: float
    explained: float


class FittedCost:
    """Microseconds of an iteration, the same on each stage. Implements ``cost.Cost``. ``extra_us``: between two
    iterations of a stage, whatever they hold. ``coefficients``: microseconds of each term."""

    def __init__(self, coefficients: Sequence[float], extra_us: float = 0.0, transfer: int = 0) -> None:
        self.coefficients = tuple(coefficients)
        self.extra_us = extra_us
        self._transfer = transfer

    def predict_us(self, batch: Measured) -> float:
        """Of one iteration, without what is between two."""
        constant, prefill, attention, decodes, kv_tokens = self.coefficients
        return (
            constant
            + prefill * batch.prefill
            + attention * batch.attention
            + decodes * batch.decodes
            + kv_tokens * batch.kv_tokens
        )

    def stage_us(self, stage: int, work: Work) -> int:
        """Microseconds of an iteration on a stage."""
        batch = Measured(work.tokens - work.decodes, work.attention, work.decodes, work.kv_tokens, 0.0)
        return max(1, round(self.predict_us(batch) + self.extra_us))

    def transfer_us(self, tokens: int) -> int:
        """Microseconds until the next stage has the hidden states of so many tokens."""
        return self._transfer


def fit(measured: Sequence[Measured], extra_us: float = 0.0, transfer: int = 0) -> FittedCost:
    """The model of what was ``measured``, of which there must be something."""
    rows = [(1.0, m.prefill, m.attention, m.decodes, m.kv_tokens) for m in measured]
    return FittedCost(least_squares(rows, [m.took_us for m in measured]), extra_us, transfer)


def least_squares(rows: Sequence[Sequence[float]], took: Sequence[float]) -> list[float]:
    """The coefficients, none of them negative, with which the terms of each row come nearest to what it ``took``:
    the squares of the relative errors are least. There must be a row."""
    terms = range(len(rows[0]))
    # Terms are brought to one scale, and each measurement counts by its relative error.
    scales = [max(1e-9, *(row[i] for row in rows)) for i in terms]
    gram = [[0.0] * len(terms) for _ in terms]
    right = [0.0] * len(terms)
    for row, us in zip(rows, took, strict=True):
        weight = 1.0 / max(us, 1.0)
        scaled = [row[i] / scales[i] * weight for i in terms]
        for i in terms:
            right[i] += scaled[i] * us * weight
            for j in terms:
                gram[i][j] += scaled[i] * scaled[j]
    found = [0.0] * len(terms)
    for _ in range(_ROUNDS):
        moved = 0.0
        for i in terms:
            if gram[i][i] <= 0.0:
                continue
            rest = right[i] - sum(gram[i][j] * found[j] for j in terms if j != i)
            value = max(0.0, rest / gram[i][i])
            moved = max(moved, abs(value - found[i]))
            found[i] = value
        if moved < 1e-9 * max(found):
            break
    return [value / scale for value, scale in zip(found, scales, strict=True)]


def residuals(cost: FittedCost, measured: Sequence[Measured]) -> Residuals:
    """Of ``cost`` on what it was fitted to, or on something else."""
    return compared([cost.predict_us(m) for m in measured], [m.took_us for m in measured])


def compared(predicted: Sequence[float], took: Sequence[float]) -> Residuals:
    """Predictions beside what iterations really took."""
    if not took:
        return Residuals(0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    sizes = sorted(abs(p - t) / max(t, 1.0) for p, t in zip(predicted, took, strict=True))
    total = sum(took)
    mean = total / len(took)
    spread = sum((t - mean) ** 2 for t in took)
    left = sum((p - t) ** 2 for p, t in zip(predicted, took, strict=True))

    def at(share: float) -> float:
        return sizes[min(len(sizes) - 1, int(share * len(sizes)))]

    return Residuals(
        len(took),
        sum(sizes) / len(sizes),
        at(0.50),
        at(0.90),
        at(0.99),
        sum(predicted) / total - 1 if total else 0.0,
        1 - left / spread if spread else 0.0,
    )
