"""The real runner: equal to transformers, and the same bits for any chunks, blocks, batch mates and stages."""

import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from evenflow.control.core.events import Limits
from evenflow.control.wire import Sampling
from evenflow.dataplane import sampler
from evenflow.dataplane.model_runner import ModelRunner, load_runner
from evenflow.dataplane.models.config import ModelError
from evenflow.dataplane.weights.random import RANDOM_CONFIG, RandomSource, write_hf_directory
from evenflow.kernels.sampling import SamplingParams, sample
from inprocess import InProcess
from runner_driver import Sequence, generate, make_batch, run_batch, sequence
from torch import Tensor
from transformers import LlamaForCausalLM

NEW = 8


@pytest.fixture
def seen_logits(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """The logits of every row that samples, in order."""
    rows: list[Tensor] = []

    def watched(logits: Tensor, drawn: dict[int, SamplingParams]) -> np.ndarray:
        rows.extend(logits.clone())
        return sample(logits, drawn)

    monkeypatch.setattr(sampler, "sample", watched)
    return rows


def prompts(count: int, vocabulary: int, longest: int) -> list[list[int]]:
    source = random.Random(5)
    lengths = [longest, *(source.randrange(1, longest) for _ in range(count - 1))]
    return [[source.randrange(vocabulary) for _ in range(length)] for length in lengths]


def build(source: RandomSource, stages: int, **options: object) -> list[ModelRunner]:
    options = {"dtype": "float32", "kv_memory": 1 << 24, "poison": True, **options}
    return [ModelRunner(source, stage, stages, **options) for stage in range(stages)]  # type: ignore[arg-type]


def place(some: list[list[int]], block_size: int) -> list[Sequence]:
    placed: list[Sequence] = []
    first = 0
    for prompt in some:
        placed.append(sequence(prompt, first, block_size, NEW))
        first += len(placed[-1].blocks)
    return placed


@pytest.mark.parametrize("tied", [True, False])
def test_equals_transformers_from_a_directory(tmp_path: Path, tied: bool, seen_logits: list[Tensor]) -> None:
    write_hf_directory(RandomSource(replace(RANDOM_CONFIG, tied=tied)), tmp_path / "model", shards=2)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    for stages in (1, 2, 3):
        runners = [
            load_runner(str(tmp_path / "model"), stage, stages, dtype="float32", kv_memory=1 << 24, poison=True)
            for stage in range(stages)
        ]
        for prompt in prompts(4, 512, 300):
            seen_logits.clear()
            placed = place([prompt], 16)
            generate(runners, placed, NEW, budget=64)
            with torch.inference_mode():
                wanted = oracle(torch.tensor([placed[0].tokens])).logits[0, len(prompt) - 1 : -1]
            torch.testing.assert_close(torch.stack(seen_logits), wanted, atol=1e-4, rtol=0)
            assert placed[0].out == wanted.argmax(-1).tolist()


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_generate_of_transformers(tmp_path: Path, penalty: float) -> None:
    write_hf_directory(RandomSource(), tmp_path / "model", shards=1)
    oracle = LlamaForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    runners = [
        load_runner(str(tmp_path / "model"), stage, 2, dtype="float32", kv_memory=1 << 22, poison=True)
        for stage in (0, 1)
    ]
    limits = Limits(token_budget=32, max_num_seqs=4, max_model_len=256, block_size=16)
    server = InProcess(limits, lambda stage, _: runners[stage], stages=2)
    some = prompts(3, 512, 60)
    for key, prompt in enumerate(some):
        server.submit(key, prompt, 30, sampling=Sampling(repetition=penalty))
    server.run()
    for key, prompt in enumerate(some):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            answer = oracle.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=30,
                do_sample=False,
                repetition_penalty=penalty,
                eos_token_id=None,
                pad_token_id=0,
            )
        assert server.tokens(key) == answer[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
def test_bits_do_not_depend_on_budget_blocks_stages_or_mates(dtype: str, seen_logits: list[Tensor]) -> None:
    """SCH-3 on a random model whose KV memory is NaN beforehand."""
    source = RandomSource()
    some = prompts(8, 512, 401)
    generate(build(source, 1, dtype=dtype), (alone := place(some[:1], 16)), NEW, budget=4096)
    wanted = torch.stack(seen_logits)
    assert len(set(alone[0].out)) > 2
    cells = [
        *((1, 16, 1, False), (1, 8, 7, False), (2, 16, 16, True), (3, 32, 17, False), (1, 16, 64, True)),
        *((2, 8, 250, False), (3, 16, 400, True), (1, 16, 401, False), (2, 32, 402, False), (3, 8, 4096, True)),
    ]
    for stages, block_size, budget, with_mates in cells:
        runners = build(source, stages, dtype=dtype, block_size=block_size)
        seen_logits.clear()
        generate(runners, place(some[:1], block_size), NEW, budget)
        assert torch.equal(torch.stack(seen_logits), wanted), (stages, block_size, budget)
        if with_mates:
            generate(runners, (placed := place(some, block_size)), NEW, budget)
            assert placed[0].out == alone[0].out, (stages, block_size, budget)


def test_a_prefix_computed_earlier_gives_the_same_bits(seen_logits: list[Tensor]) -> None:
    source, prompt = RandomSource(), prompts(1, 512, 200)[0]
    runners = build(source, 2)
    placed = place([prompt], 16)
    generate(runners, placed, NEW, budget=4096)
    wanted = seen_logits[0]
    # The first nine blocks stay as they are; the rest is computed again in other blocks.
    again = sequence(prompt, 100, 16, NEW)
    again.blocks[:9] = placed[0].blocks[:9]
    again.computed = 144
    run_batch(runners, [(again, 56)])
    assert torch.equal(seen_logits[-1], wanted)


def test_two_threads_give_the_same_bits(seen_logits: list[Tensor]) -> None:
    some = prompts(3, 512, 150)
    for threads in (1, 2):
        torch.set_num_threads(threads)
        generate(build(RandomSource(), 1), place(some, 16), 3, budget=64)
    half = len(seen_logits) // 2
    assert torch.equal(torch.stack(seen_logits[:half]), torch.stack(seen_logits[half:]))


def test_reference_backend_gives_the_same_tokens() -> None:
    some = prompts(3, 512, 100)
    outs = []
    for attention in ("cpu", "reference"):
        generate(build(RandomSource(), 1, attention=attention), (placed := place(some, 16)), NEW, budget=32)
        outs.append([one.out for one in placed])
    assert outs[0] == outs[1]


def test_sampling_depends_on_seed_and_position_only() -> None:
    runners = build(RandomSource(), 1)

    def draw(seeds: list[int], budget: int) -> list[list[int]]:
        placed = place([[1, 2, 3]] * len(seeds), 16)
        for one, seed in zip(placed, seeds, strict=True):
            one.temperature, one.top_p, one.seed = 1.0, 0.95, seed
        generate(runners, placed, NEW, budget)
        return [one.out for one in placed]

    together = draw([1, 2, 3, 2**64 - 1], 100)
    assert len({tuple(out) for out in together}) == 4
    assert draw([3], 1)[0] == together[2]
    assert draw([2**64 - 1, 2], 2) == [together[3], together[1]]


def test_hidden_states_are_the_residual_stream_as_bytes() -> None:
    first, last = build(RandomSource(), 2, dtype="bfloat16")
    assert first.info.hidden_bytes == 96 * 2
    batch = make_batch([(sequence([5, 6, 7], 0, 16, 1), 3)], 16)
    hidden, nothing = first.run(batch, None)
    assert not nothing
    assert hidden.shape == (3, 192) and hidden.dtype == np.uint8
    read_only = hidden.copy()
    read_only.flags.writeable = False
    ids, nothing = last.run(batch, read_only)
    assert not nothing
    assert ids.dtype == np.int64 and ids.shape == (1,)
    with pytest.raises(ValueError, match=r"shape \(2, 192\) came for 3 tokens"):
        last.run(batch, hidden[:2])


def test_memory_is_checked_at_start() -> None:
    source = RandomSource()
    block = 16 * 2 * 4 * 2 * 16 * 4
    runner = build(source, 1, kv_memory=block * 11)[0]
    assert (runner.info.num_blocks, runner.info.max_model_len) == (10, 160)
    with pytest.raises(ModelError, match="raise the KV memory or lower the block size"):
        build(source, 1, kv_memory=block)
    with pytest.raises(ModelError, match="dtype float16 is not supported; supported: bfloat16, float32, int8, int4"):
        build(source, 1, dtype="float16")
    with pytest.raises(ModelError, match="attention backend magic is not known; known: cpu, reference"):
        build(source, 1, attention="magic")


def test_weights_that_are_not_finite_are_refused() -> None:
    class Broken(RandomSource):
        def load(self, name: str) -> Tensor:
            tensor = super().load(name)
            if "layers.2.mlp.up_proj" in name:
                tensor[3, 4] = torch.nan
            return tensor

    for dtype in ("float32", "int8", "int4"):
        with pytest.raises(ModelError, match=r"tensor model\.layers\.2\.mlp\.up_proj\.weight of random holds values"):
            build(Broken(), 1, dtype=dtype)
