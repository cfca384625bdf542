"""A layer as one operation: the bits of the nine operations that it stands for, and where it cannot be used."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
from evenflow.dataplane.model_runner import ModelRunner
from evenflow.dataplane.models.layers import fusable
from evenflow.dataplane.models.llama import LlamaStage
from evenflow.dataplane.weights.precision import PRECISIONS
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource
from evenflow.kernels import cpu
from evenflow.kernels.attention import ReferenceAttention
from runner_driver import Sequence, run_batch, sequence

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels cannot be built here")
BLOCK = 16
CONFIGS = {
    "plain": RANDOM_CONFIG,
    "biases": replace(RANDOM_CONFIG, qkv_bias=True),
    "windows": replace(RANDOM_CONFIG, windows=(0, 24, 7, 0)),
}


@pytest.fixture(autouse=True)
def same_level() -> Iterator[None]:
    best = cpu.levels()[-1]
    yield
    cpu.use_level(best)


def batches(stages: list[ModelRunner], sequences: list[Sequence]) -> list[torch.Tensor]:
    """Hidden states of chunks, of decodes, and of both, as the last stage's layers leave them."""
    seen: list[torch.Tensor] = []
    last = stages[-1]._stage
    logits = last.logits

    def heard(x: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        seen.append(x.clone())
        return logits(x, rows)

    last.logits = heard  # type: ignore[method-assign]
    one, two, three = sequences
    run_batch(stages, [(one, 40)])
    run_batch(stages, [(two, 17), (one, 5)])
    run_batch(stages, [(one, 1), (two, 1)])
    run_batch(stages, [(one, 1), (two, 1), (three, 33)])
    return seen


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("config", CONFIGS)
def test_one_operation_has_the_bits_of_nine(config: str, dtype: str) -> None:
    source = RandomSource(CONFIGS[config])
    found: list[list[torch.Tensor]] = []
    for fused in (True, False):
        stages = [ModelRunner(source, stage, 2, dtype=dtype, kv_memory=4 << 20, poison=True) for stage in range(2)]
        for runner in stages:
            # Where the processor computes bfloat16 itself, layers of that type are oneDNN's.
            assert (runner._stage._fused is not None) == (runner._stage.compute is torch.float32)
            if not fused:
                runner._stage._fused = None
        draw = torch.Generator().manual_seed(5)
        prompts = [torch.randint(1, 500, (length,), generator=draw).tolist() for length in (45, 17, 33)]
        found.append(
            batches(stages, [sequence(prompt, 8 * number, BLOCK, 4) for number, prompt in enumerate(prompts)])
        )
    assert len(found[0]) == len(found[1]) == 3
    for one, nine in zip(*found, strict=True):
        assert bool(torch.isfinite(one.float()).all()) and torch.equal(one, nine)


def test_memory_grows_with_the_largest_batch_and_is_kept() -> None:
    stage = LlamaStage(RandomSource(), 0, 1, PRECISIONS["float32"])
    runner = ModelRunner(RandomSource(), 0, 1, dtype="float32", kv_memory=4 << 20)
    fused = runner._stage._fused
    assert fused is not None and stage._fused is not None
    sizes: list[int] = []
    for rows in (3, 50, 7):
        run_batch([runner], [(sequence(list(range(1, rows + 2)), 0, BLOCK, 1), rows)])
        sizes.append(len(fused._memory[0]))
    assert sizes == [3, 50, 50]


def test_what_one_operation_cannot_compute_is_taken_apart() -> None:
    normed = LlamaStage(RandomSource(replace(RANDOM_CONFIG, qk_norm=True)), 0, 1, PRECISIONS["float32"])
    assert not fusable(normed._layers) and normed._fused is None
    # A cache in another layout: the stage's layers could be one operation each, but not with that backend.
    runner = ModelRunner(RandomSource(), 0, 1, dtype="float32", kv_memory=4 << 20, attention="reference")
    assert isinstance(runner._backend, ReferenceAttention)
    run_batch([runner], [(sequence([5, 6, 7], 0, BLOCK, 1), 3)])
    assert runner._stage._fused is not None and len(runner._stage._fused._memory[0]) == 0
