"""What a batch takes on a modelled device, for a worker that sleeps that long: ``cost.Cost`` in real time.

The same objects tell it in virtual time (``stages.ModelledStages``); here they are asked with what a worker has, a
``StageBatch``. A stage that is not the last does not know which chunks end their prompts, but it has no head either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..batch import StageBatch
from ..profile import Shape
from .cost import Cost, Work


class Timing(NamedTuple):
    """Seconds of an iteration, of its input's way from the stage before, and of one of a shape."""

    batch: Callable[[StageBatch], float]
    arrival: Callable[[StageBatch], float]
    shape: Callable[[Shape], float]


def timing_of(cost: Cost, stage: int) -> Timing:
    """Of one stage."""

    def batch_s(batch: StageBatch) -> float:
        return cost.stage_us(stage, work_of(batch)) / 1e6

    def arrival_s(batch: StageBatch) -> float:
        return cost.transfer_us(batch.num_tokens) / 1e6 if stage else 0.0

    def shape_s(shape: Shape) -> float:
        chunks = [] if shape.decodes else [(shape.each, shape.context)] * shape.rows
        work = Work(shape.tokens, shape.decodes, shape.kv_tokens, chunks, shape.rows, float(shape.attention))
        return cost.stage_us(stage, work) / 1e6

    return Timing(batch_s, arrival_s, shape_s)


def constant_timing(step_s: float, token_s: float) -> Timing:
    """So many seconds an iteration, and for each of its tokens."""
    return Timing(
        lambda batch: step_s + token_s * batch.num_tokens,
        lambda batch: 0.0,
        lambda shape: step_s + token_s * shape.tokens,
    )


def work_of(batch: StageBatch) -> Work:
    """What of a batch its cost depends on."""
    decodes = batch.num_decodes
    chunks: list[tuple[int, int]] = []
    attention = 0.0
    if decodes < len(batch.slots):
        starts, lengths = batch.cu_q[decodes:].tolist(), batch.kv_len[decodes:].tolist()
        for start, end, length in zip(starts, starts[1:], lengths, strict=False):
            taken = end - start
            chunks.append((taken, length - taken))
            attention += taken * (length - taken + 0.5 * (taken + 1))
    sampled = decodes if batch.sampling is None else len(batch.sampling.rows)
    return Work(batch.num_tokens, decodes, int(batch.kv_len[:decodes].sum()), chunks, sampled, attention)
