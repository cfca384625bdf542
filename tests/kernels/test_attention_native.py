"""The C++ attention at every instruction set level: equal to the oracle, and the same bits however work is cut."""

from collections.abc import Iterator

import pytest
import torch
from attention_cases import DIM, chunked, run, sequences
from evenflow.kernels import cpu
from evenflow.kernels.attention import AttnBatch, ReferenceAttention, place
from evenflow.kernels.attention_native import NativeAttention
from evenflow.kernels.rope import RopeTable, base_frequencies
from hypothesis import given, settings
from hypothesis import strategies as st

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels cannot be built here")
LEVELS = cpu.levels() if cpu.available() else []


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    assert cpu.use_level(request.param)
    yield request.param
    cpu.use_level(LEVELS[-1])


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[list[tuple[int, int, int]]]]:
    """Lengths of sequences, and steps of (sequence, tokens before, new tokens) that compute all of them."""
    lengths = draw(st.lists(st.one_of(st.integers(1, 12), st.integers(60, 135)), min_size=1, max_size=4))
    done = [0] * len(lengths)
    steps: list[list[tuple[int, int, int]]] = []
    while done != lengths:
        step: list[tuple[int, int, int]] = []
        for index, length in enumerate(lengths):
            if rest := length - done[index]:
                new = draw(st.sampled_from([1, 2, 7, 33, 64, rest]))
                step.append((index, done[index], min(new, rest)))
                done[index] += min(new, rest)
        # Long sequences are not read token by token.
        if len(steps) == 4:
            step = [(index, before, lengths[index] - before) for index, before, _ in step]
            done = list(lengths)
        steps.append(step)
    return lengths, steps


@settings(deadline=None, max_examples=25)
@given(
    batches(),
    st.sampled_from([(1, 1), (2, 2), (3, 1), (4, 2), (9, 3), (7, 1), (8, 1)]),
    st.sampled_from([8, 16, 20, 32, 64, 80]),
    st.sampled_from([1, 3, 8, 16, 32, 128]),
    st.sampled_from([0, 0, 1, 5, 64, 100]),
    st.sampled_from([torch.float32, torch.bfloat16]),
)
@pytest.mark.parametrize("name", LEVELS)
def test_equals_the_oracle(
    name: str,
    batch: tuple[list[int], list[list[tuple[int, int, int]]]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    window: int,
    dtype: torch.dtype,
) -> None:
    """Unwritten blocks hold NaN, and so does the output before."""
    assert cpu.use_level(name)
    lengths, steps = batch
    data = sequences(lengths, *heads, seed=dim, dim=dim)
    actual = run(NativeAttention(), data, steps, block_size, dtype, window=window)
    cpu.use_level(LEVELS[-1])
    bound = 1e-5
    if dtype is torch.bfloat16 and name == "avx512bf16":
        # Queries are rounded to bfloat16 as they are scaled, and so are weights: by a part of 2^-9 at the most.
        scale = torch.tensor(dim**-0.5) * torch.tensor(1.44269504)
        data = [((q * scale).to(dtype).float() / scale, k, v) for q, k, v in data]
        bound = 2.0**-9 * max(float(v.abs().max()) for _, _, v in data) + 1e-4
    expected = run(ReferenceAttention(torch.float64), data, steps, block_size, dtype, window=window)
    for one, other in zip(expected, actual, strict=True):
        torch.testing.assert_close(one, other, atol=bound, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "threads"), [(0, 1), (10, 1), (64, 1), (100, 1), (0, 2), (100, 2)])
def test_bits_do_not_depend_on_how_work_is_cut(level: str, dtype: torch.dtype, window: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        data = sequences([300, 37, 130, 5, 64, 1], 9, 3)
        alone = [
            run(NativeAttention(), [one], chunked(len(one[0]), 300), 16, dtype, window=window)[0] for one in data
        ]
        for chunk, block_size in [(1, 16), (7, 8), (16, 32), (17, 5), (64, 16), (250, 128)]:
            if chunk < 16 and threads > 1:
                # Two threads in hundreds of steps take long on a busy machine.
                continue
            steps = chunked(300, chunk)
            cut = run(NativeAttention(), data[:1], steps, block_size, dtype, seed=chunk, window=window)[0]
            assert torch.equal(alone[0], cut), f"chunks of {chunk}, blocks of {block_size}"
        lengths = [len(one[0]) for one in data]
        steps = [
            [(index, 0, length - 2) for index, length in enumerate(lengths) if length > 2],
            [(index, max(length - 2, 0), 1) for index, length in enumerate(lengths)],
            [(index, length - 1, 1) for index, length in enumerate(lengths) if length > 1],
        ]
        together = run(NativeAttention(), data, steps, 16, dtype, window=window)
        assert all(torch.equal(one, other) for one, other in zip(alone, together, strict=True))
    finally:
        torch.set_num_threads(before)


def batch_with(slot: list[int]) -> AttnBatch:
    return AttnBatch(
        cu_q=torch.tensor([0, 1], dtype=torch.int32),
        kv_len=torch.tensor([1], dtype=torch.int32),
        block_table=torch.tensor([[1]], dtype=torch.int32),
        slot=torch.tensor(slot),
        num_decodes=1,
    )


@pytest.mark.parametrize("dim", [8, 16, 20, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_and_storing_equal_torch(level: str, dim: int, dtype: torch.dtype) -> None:
    native, torch_way = NativeAttention(), NativeAttention()
    batch = batch_with([37, -1, 5])
    cos, sin = RopeTable(base_frequencies(dim, 1e4), 50).rows(torch.tensor([1, 40, 17]))
    qkv = torch.randn(3, 10, dim, generator=torch.Generator().manual_seed(0))
    caches = [backend.allocate(1, 3, 16, 2, dim, dtype) for backend in (native, torch_way)]
    one, other = qkv.clone(), qkv.clone()
    native.place(one, cos, sin, caches[0], 0, batch)
    place(torch_way, other, cos, sin, caches[1], 0, batch)
    torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)
    assert torch.equal(one[:, 8:], qkv[:, 8:])
    for mine, theirs in zip(caches[0].keys + caches[0].values, caches[1].keys + caches[1].values, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6 if dtype is torch.float32 else 2**-7)
    # Keys lie by dimension, values by position.
    assert torch.equal(caches[0].keys[0][2, 1, :, 5], one[0, 7].to(dtype))
    assert torch.equal(caches[0].values[0][0, 0, 5], one[2, 8].to(dtype))
    assert int(caches[0].values[0].count_nonzero()) == 4 * dim


def test_negative_slot_writes_nothing() -> None:
    """CG-1: padding must not land in the last slot."""
    backend = NativeAttention()
    cache = backend.allocate(1, 3, 16, 2, DIM, torch.float32)
    new = torch.ones(3, 2, DIM)
    backend.write_kv(new, new, cache, 0, batch_with([16, -1, -1]))
    assert int(cache.keys[0].count_nonzero()) == 2 * DIM
    assert int(cache.values[0].count_nonzero()) == 2 * DIM


def test_what_lies_outside_the_cache_is_refused() -> None:
    backend = NativeAttention()
    cache = backend.allocate(1, 3, 16, 2, DIM, torch.float32)
    new, out = torch.ones(1, 2, DIM), torch.empty(1, 2, DIM)
    with pytest.raises(RuntimeError, match="slot lies outside"):
        backend.write_kv(new, new, cache, 0, batch_with([48]))
    for field, value in [
        ("block_table", [[3]]),
        ("block_table", [[-1]]),
        ("kv_len", [17]),
        ("kv_len", [0]),
        ("cu_q", [0, 2]),
    ]:
        batch = batch_with([16])
        setattr(batch, field, torch.tensor(value, dtype=torch.int32))
        with pytest.raises(RuntimeError, match=r"outside|not in the cache"):
            backend.attend(new, cache, 0, batch, out, 1.0)
