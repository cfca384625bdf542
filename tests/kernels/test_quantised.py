"""Weights in 8 and 4 bits at every instruction set level: against float64, against operations of torch to the bit,
and the same bits however the work is cut.
"""

from collections.abc import Iterator

import pytest
import torch
from evenflow.kernels import cpu
from evenflow.kernels.packed import PANEL
from evenflow.kernels.quantised import (
    GROUP,
    Int4Linear,
    Int4Weight,
    Int8Linear,
    Int8Weight,
    quantise4,
    quantise8,
    relative_error,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

LEVELS = cpu.levels() if cpu.available() else []
compiled = pytest.mark.skipif(not LEVELS, reason="the C++ kernels cannot be built here")
BITS = (8, 4)
#: Around the heights of tiles.
ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 25])
COLUMNS = st.integers(1, 3 * PANEL + 1)
INPUTS = st.integers(1, 140)


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    if LEVELS:
        cpu.use_level(LEVELS[-1])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer_of(bits: int, weight: Tensor, bias: Tensor | None = None) -> Int8Linear | Int4Linear:
    return Int8Linear(quantise8(weight), bias) if bits == 8 else Int4Linear(quantise4(weight), bias)


def plain_layer(bits: int, weight: Tensor, bias: Tensor | None = None) -> Int8Linear | Int4Linear:
    """Computed by operations of torch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "available", lambda: False)
        return layer_of(bits, weight, bias)


def product(layer: Int8Linear | Int4Linear, x: Tensor) -> Tensor:
    """Into memory that was NaN, with columns on either side that must stay so."""
    around = torch.full((len(x) + 2, layer.out_features + 7), torch.nan)
    out = around[1:-1, 3:-4]
    layer.into(x, out)
    assert bool(around[:, :3].isnan().all() and around[:, -4:].isnan().all())
    assert bool(around[0].isnan().all() and around[-1].isnan().all())
    return out.contiguous()


def apart(x: Tensor, gap: int) -> Tensor:
    """The same rows ``gap`` numbers apart, beginning at no boundary; what lies between must not be read."""
    memory = torch.full((len(x), x.shape[1] + gap + 1), torch.nan)
    memory[:, 1 : x.shape[1] + 1] = x
    return memory[:, 1 : x.shape[1] + 1]


def exact(bits: int, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The product of the rounded weights and activations in float64, and the sum of its terms' sizes."""
    rounded = (quantise8(weight) if bits == 8 else quantise4(weight)).dequantised().double()
    parts: list[Tensor] = []
    for part in x.split(GROUP, 1):
        largest = part.abs().amax(1, keepdim=True)
        inverse = torch.where(largest > 0, 127.0 / largest, 0.0)
        parts.append((part * inverse).round().double() * (largest / 127.0).double())
    wide = torch.cat(parts, 1)
    return wide @ rounded.T, wide.abs() @ rounded.abs().T


@compiled
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=60)
@given(ROWS, COLUMNS, INPUTS, st.booleans(), st.integers(0, 3), st.integers(0, 9))
def test_equals_float64_and_torch(
    level: str, bits: int, rows: int, columns: int, inputs: int, biased: bool, gap: int, seed: int
) -> None:
    assert cpu.use_level(level)
    weight, x = draw(seed, columns, inputs), draw(seed + 1, rows, inputs)
    bias = draw(seed + 2, columns) if biased else None
    found = product(layer_of(bits, weight, bias), apart(x, gap))
    wanted, terms = exact(bits, weight, x)
    if bias is not None:
        wanted += bias
        terms += bias.abs()
    # Minima and scales take two roundings and an addition a group; their terms may cancel.
    groups = -(-inputs // GROUP)
    bound = (terms + 16 * x.abs().sum(1, keepdim=True)) * (4 * groups + 4) * 2.0**-24
    assert bool(((found.double() - wanted).abs() <= bound).all())
    assert torch.equal(found, plain_layer(bits, weight, bias)(x))


@pytest.mark.parametrize("bits", BITS)
def test_torch_equals_float64(bits: int) -> None:
    """Where there is no compiler, too."""
    weight, x = draw(0, 70, 2500), draw(1, 5, 2500)
    wanted, terms = exact(bits, weight, x)
    found = product(plain_layer(bits, weight), x)
    assert bool(((found.double() - wanted).abs() <= terms * 400 * 2.0**-24).all())


@compiled
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_batch_and_at_every_level(level: str, bits: int, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for columns, inputs in [(96, 64), (200, 577), (577, 96), (49, 3000)]:
            layer = layer_of(bits, draw(0, columns, inputs), draw(1, columns))
            rows = draw(2, 130, inputs)
            assert cpu.use_level(LEVELS[0])
            whole = layer(rows)
            assert cpu.use_level(level)
            assert torch.equal(layer(rows), whole)
            for begin in (0, 5, 129):
                for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 64):
                    some = rows[begin : begin + count]
                    assert torch.equal(layer(some), whole[begin : begin + count]), f"{len(some)} rows from {begin}"
    finally:
        torch.set_num_threads(before)


@compiled
@pytest.mark.parametrize("level", LEVELS)
def test_the_largest_sums_fit(level: str) -> None:
    """All weights and activations at an end of their range."""
    assert cpu.use_level(level)
    for sign in (-1, 1):
        x = torch.full((3, 192), 127.0 * sign)
        for each in (-127, 127):
            eight = Int8Weight(torch.full((50, 192), each, dtype=torch.int8), torch.ones(50, 6, dtype=torch.float16))
            assert torch.equal(Int8Linear(eight)(x), torch.full((3, 50), 127.0 * each * 192 * sign))
        ones, none = torch.ones(50, 6, dtype=torch.float16), torch.zeros(50, 6, dtype=torch.float16)
        four = Int4Weight(torch.full((50, 192), 15, dtype=torch.uint8), ones, none)
        assert torch.equal(Int4Linear(four)(x), torch.full((3, 50), 127.0 * 15 * 192 * sign))


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bits", BITS)
def test_no_row_changes_another_whatever_it_holds(bits: int, plain: bool) -> None:
    layer = (plain_layer if plain else layer_of)(bits, draw(0, 60, 70))
    x = draw(1, 6, 70)
    wanted = layer(x)
    x[1, 3], x[2, 69], x[3] = torch.nan, torch.inf, 0.0
    x[4] = 1e-38
    found = layer(x)
    assert torch.equal(found[[0, 5]], wanted[[0, 5]])
    assert not found[1:3].isfinite().any()
    assert not found[3:5].any()


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("bits", BITS)
@settings(deadline=None, max_examples=30)
@given(columns=COLUMNS, inputs=INPUTS)
def test_rows_are_the_weights(columns: int, inputs: int, bits: int, plain: bool) -> None:
    weight = draw(0, columns, inputs)
    rounded = (quantise8(weight) if bits == 8 else quantise4(weight)).dequantised()
    layer = (plain_layer if plain else layer_of)(bits, weight)
    ids = torch.tensor([columns - 1, 0, columns // 2, 0])
    assert torch.equal(layer.rows(ids), rounded[ids])
    assert torch.equal(layer.rows(torch.arange(columns)), rounded)


def test_what_is_lost_by_rounding() -> None:
    """8 bits: half a step of 1/127 of a group's largest at most. 4 bits: the best of several ranges."""
    weight = draw(0, 100, 640)
    lost = (quantise8(weight).dequantised() - weight).abs()
    largest = weight.abs().view(100, -1, GROUP).amax(2).repeat_interleave(GROUP, 1)
    assert bool((lost <= largest / 127 * 0.5005).all())
    assert 0.05 < relative_error(weight, quantise4(weight).dequantised()) < 0.09
    # What 4 bits can hold, they do hold.
    steps = torch.arange(16, dtype=torch.float32).repeat(2)[None] * 0.25 - 1.5
    assert torch.equal(quantise4(steps).dequantised(), steps)
    for same in (torch.zeros(3, 40), torch.full((3, 40), 0.75)):
        assert torch.equal(quantise4(same).dequantised(), same)
        assert torch.allclose(quantise8(same).dequantised(), same, rtol=2.0**-11)


def test_weights_take_the_bytes_they_promise() -> None:
    weight = draw(0, 480, 640)
    assert layer_of(8, weight).num_bytes == 480 * 640 + 480 * 20 * 2
    assert layer_of(4, weight).num_bytes == 480 * 640 // 2 + 480 * 20 * 4


@compiled
def test_wrong_operands_are_refused() -> None:
    for layer in (layer_of(8, draw(0, 50, 20)), layer_of(4, draw(0, 50, 20))):
        for x, out in [
            (draw(1, 3, 80), torch.empty(3, 50)),
            (draw(1, 3, 20), torch.empty(2, 50)),
            (draw(1, 3, 20), torch.empty(3, 49 + PANEL)),
            (draw(1, 20, 3).T, torch.empty(3, 50)),
            (draw(1, 3, 20).double(), torch.empty(3, 50)),
            (draw(1, 3, 20), torch.empty(3, 50, dtype=torch.bfloat16)),
        ]:
            with pytest.raises(RuntimeError):
                layer.into(x, out)
    assert layer_of(8, draw(0, 50, 20))(torch.empty(0, 20)).shape == (0, 50)
