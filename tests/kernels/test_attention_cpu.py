"""The CPU attention: equal to the oracle, and the same bits however the work is cut."""

import pytest
import torch
from attention_cases import DIM, chunked, run, sequences
from evenflow.kernels.attention import AttnBatch, ReferenceAttention
from evenflow.kernels.attention_cpu import CPUAttention
from torch import Tensor


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 2), (9, 3), (8, 1)])
def test_equals_the_oracle_in_mixed_batches(heads: int, kv_heads: int) -> None:
    data = sequences([1, 15, 256, 257, 700, 40], heads, kv_heads)
    steps = [
        [(1, 0, 15), (2, 0, 255)],
        [(2, 255, 1), (0, 0, 1), (3, 0, 257)],
        [(4, 0, 300)],
        [(4, 300, 399), (5, 0, 40)],
        [(4, 699, 1)],
    ]
    expected = run(ReferenceAttention(torch.float64), data, steps, 16)
    actual = run(CPUAttention(), data, steps, 16)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("window", [1, 2, 64, 255, 256, 257, 400, 1000])
def test_sliding_window_equals_the_oracle_and_the_definition(window: int) -> None:
    data = sequences([1, 15, 257, 700, 40, 513], 6, 2)
    steps = [
        [(1, 0, 15), (2, 0, 255), (5, 0, 512)],
        [(2, 255, 1), (0, 0, 1), (3, 0, 257), (5, 512, 1)],
        [(2, 256, 1), (3, 257, 300)],
        [(3, 557, 142), (4, 0, 40)],
        [(3, 699, 1)],
    ]
    expected = run(ReferenceAttention(torch.float64), data, steps, 16, window=window)
    actual = run(CPUAttention(), data, steps, 16, window=window)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)
    # The reference itself: the last query of a sequence over its last keys alone.
    q, k, v = (part[-window:].to(torch.float64) for part in data[3])
    keys, values = (part.repeat_interleave(3, 1) for part in (k, v))
    weights = (torch.einsum("hd,khd->hk", q[-1], keys) * DIM**-0.5).softmax(-1)
    torch.testing.assert_close(expected[3][-1].double(), torch.einsum("hk,khd->hd", weights, values))


@pytest.mark.parametrize("window", [10, 256, 300])
def test_bits_in_a_sliding_window_do_not_depend_on_how_work_is_cut(window: int) -> None:
    data = sequences([600, 37, 270], 9, 3)
    alone = [run(CPUAttention(), [one], chunked(len(one[0]), 600), 16, window=window)[0] for one in data]
    for chunk, block_size in [(17, 16), (250, 8), (256, 32)]:
        cut = run(CPUAttention(), data[:1], chunked(600, chunk), block_size, seed=chunk, window=window)[0]
        assert torch.equal(alone[0], cut), f"chunks of {chunk}, blocks of {block_size}"
    steps = [
        [(0, 0, 520), (1, 0, 30), (2, 0, 257)],
        *([(index, before + step, 1) for index, before in ((0, 520), (1, 30), (2, 257))] for step in range(7)),
        [(0, 527, 73), (2, 264, 6)],
    ]
    for one, other in zip(alone, run(CPUAttention(), data, steps, 16, window=window), strict=True):
        assert torch.equal(one, other)


def test_bfloat16_cache_equals_the_oracle_on_rounded_keys() -> None:
    data = sequences([300, 20], 6, 2)
    steps = [[(0, 0, 299), (1, 0, 19)], [(0, 299, 1), (1, 19, 1)]]
    expected = run(ReferenceAttention(torch.float64), data, steps, 16, torch.bfloat16)
    actual = run(CPUAttention(), data, steps, 16, torch.bfloat16)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def long_sequences() -> list[tuple[Tensor, Tensor, Tensor]]:
    return sequences([600, 37, 270, 5, 16, 1, 130, 256], 9, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_bits_do_not_depend_on_how_work_is_cut(
    long_sequences: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype, threads: int
) -> None:
    alone = run(CPUAttention(), long_sequences[:1], chunked(600, 600), 16, dtype)[0]
    torch.set_num_threads(threads)
    for chunk, block_size in [(1, 16), (7, 8), (16, 32), (17, 16), (64, 16), (250, 8), (256, 16)]:
        steps = chunked(600, chunk)
        if chunk == 1 and threads > 1:
            # Two threads in 600 steps take a minute on a busy machine: single steps where a tile ends and begins.
            steps = [[(0, 0, 230)], *steps[230:280], [(0, 280, 210)], *steps[490:530], [(0, 530, 70)]]
        cut = run(CPUAttention(), long_sequences[:1], steps, block_size, dtype, seed=chunk)[0]
        assert torch.equal(alone, cut), f"chunks of {chunk}, blocks of {block_size}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_batch_mates(
    long_sequences: list[tuple[Tensor, Tensor, Tensor]], dtype: torch.dtype
) -> None:
    alone = [run(CPUAttention(), [one], chunked(len(one[0]), 600), 16, dtype)[0] for one in long_sequences]
    lengths = [len(one[0]) for one in long_sequences]
    # All but the last two tokens as chunks of one batch, then two batches of decodes only.
    steps = [
        [(index, 0, length - 2) for index, length in enumerate(lengths) if length > 2],
        [(index, max(length - 2, 0), 1) for index, length in enumerate(lengths)],
        [(index, length - 1, 1) for index, length in enumerate(lengths) if length > 1],
    ]
    together = run(CPUAttention(), long_sequences, steps, 16, dtype)
    for one, other in zip(alone, together, strict=True):
        assert torch.equal(one, other)


def test_cached_prefix_gives_the_same_bits(long_sequences: list[tuple[Tensor, Tensor, Tensor]]) -> None:
    whole = run(CPUAttention(), long_sequences[:1], chunked(600, 600), 16)[0]
    resumed = run(CPUAttention(), long_sequences[:1], [[(0, 0, 304)], [(0, 304, 296)]], 16)[0]
    assert torch.equal(whole, resumed)


@pytest.mark.parametrize("make", [CPUAttention, ReferenceAttention])
def test_negative_slot_writes_nothing(make: type[CPUAttention] | type[ReferenceAttention]) -> None:
    """CG-1: padding must not land in the last slot."""
    backend = make()
    cache = backend.allocate(1, 3, 16, 2, DIM, torch.float32)
    batch = AttnBatch(
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
        kv_len=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot=torch.tensor([16, -1, -1]),
        num_decodes=1,
    )
    new = torch.ones(3, 2, DIM)
    backend.write_kv(new, new, cache, 0, backend.plan(batch, cache))
    assert int(cache.keys[0].count_nonzero()) == 2 * DIM
    assert int(cache.values[0].count_nonzero()) == 2 * DIM


def test_block_size_must_divide_the_tile() -> None:
    with pytest.raises(ValueError, match="block size 24 does not divide 256"):
        CPUAttention().allocate(1, 3, 24, 2, DIM, torch.float32)
