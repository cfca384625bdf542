"""The packed matrix product at every instruction set level: against float64, and the same bits however it is cut."""

from collections.abc import Iterator

import pytest
import torch
from evenflow.kernels import cpu
from evenflow.kernels.linear import make_linear, padded_rows, smallest_rows
from evenflow.kernels.packed import PANEL, PackedLinear, pack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels cannot be built here")
LEVELS = cpu.levels() if cpu.available() else []
#: Around the heights of tiles, the number of panels that go together and the row count from which panels are widened.
ROWS = st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 9, 13, 17, 18, 23, 24, 25, 40])
COLUMNS = st.integers(1, 5 * PANEL + 1)
#: The level that rounds activations to bfloat16 where weights are.
ROUNDS = "avx512bf16"
INPUTS = st.integers(1, 70)


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    cpu.use_level(LEVELS[-1])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def product(layer: PackedLinear, x: Tensor) -> Tensor:
    """Into memory that was NaN, with columns on either side that must stay so."""
    around = torch.full((len(x) + 2, layer.out_features + 7), torch.nan)
    out = around[1:-1, 3:-4]
    layer.into(x, out)
    assert bool(around[:, :3].isnan().all() and around[:, -4:].isnan().all())
    assert bool(around[0].isnan().all() and around[-1].isnan().all())
    return out.contiguous()


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=60)
@given(ROWS, COLUMNS, INPUTS, st.booleans(), st.booleans(), st.integers(0, 3), st.integers(0, 9))
def test_equals_float64(
    level: str, rows: int, columns: int, inputs: int, bf16: bool, biased: bool, gap: int, seed: int
) -> None:
    assert cpu.use_level(level)
    weight = draw(seed, columns, inputs).to(torch.bfloat16 if bf16 else torch.float32)
    bias = draw(seed + 1, columns) if biased else None
    # Rows that are ``gap`` numbers apart and begin at no boundary; what lies between must not be read.
    memory = torch.full((rows, inputs + gap + 1), torch.nan)
    x = memory[:, 1 : inputs + 1]
    x.copy_(draw(seed + 2, rows, inputs))
    found = product(PackedLinear(weight, bias), x)
    wide, exact = (x.to(torch.bfloat16) if bf16 and level == ROUNDS else x).double(), weight.double()
    terms = wide.abs() @ exact.abs().T
    wanted = wide @ exact.T
    if bias is not None:
        wanted += bias
        terms += bias.abs()
    # Each of the additions rounds once, two with a multiplication where there is no fused one.
    bound = terms * (2 * inputs + 1) * 2.0**-24
    assert bool(((found.double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_batch(level: str, dtype: torch.dtype, threads: int) -> None:
    assert cpu.use_level(level)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for columns, inputs in [(96, 64), (200, 577), (577, 96), (49, 3000)]:
            layer = PackedLinear(draw(0, columns, inputs).to(dtype), draw(1, columns))
            rows = draw(2, 130, inputs)
            whole = layer(rows)
            for begin in (0, 5, 129):
                for count in (1, 2, 3, 4, 5, 7, 8, 9, 16, 23, 24, 25, 64):
                    some = rows[begin : begin + count]
                    assert torch.equal(layer(some), whole[begin : begin + count]), f"{len(some)} rows from {begin}"
    finally:
        torch.set_num_threads(before)


def test_levels_with_fused_additions_agree_to_the_bit() -> None:
    x = draw(2, 30, 333)
    for dtype in (torch.float32, torch.bfloat16):
        layer = PackedLinear(draw(0, 200, 333).to(dtype), draw(1, 200))
        results: list[Tensor] = []
        for level in LEVELS:
            if level != "baseline" and not (level == ROUNDS and dtype is torch.bfloat16):
                assert cpu.use_level(level)
                results.append(layer(x))
        assert all(torch.equal(results[0], result) for result in results)


@pytest.mark.skipif(ROUNDS not in LEVELS, reason="the processor does not multiply bfloat16")
def test_what_is_rounded_before_makes_no_difference_where_activations_are_rounded() -> None:
    """Values beyond the range of bfloat16 become infinite, NaN stays, and other rows are as they were."""
    assert cpu.use_level(ROUNDS)
    layer = PackedLinear(draw(0, 100, 77).to(torch.bfloat16))
    x = draw(2, 30, 77)
    assert torch.equal(layer(x), layer(x.to(torch.bfloat16).float()))
    odd = x.clone()
    odd[3, 5], odd[4, 76], odd[5, 0] = 3.4e38, torch.nan, torch.inf
    found, wanted = layer(odd), layer(x)
    assert not found[3:6].isfinite().any()
    assert torch.equal(found[:3], wanted[:3]) and torch.equal(found[6:], wanted[6:])


@settings(deadline=None, max_examples=30)
@given(COLUMNS, INPUTS, st.booleans())
def test_packed_weights_hold_every_value_once(columns: int, inputs: int, bf16: bool) -> None:
    weight = draw(0, columns, inputs).to(torch.bfloat16 if bf16 else torch.float32)
    packed = pack(weight)
    columns_first = packed.permute(0, 2, 1, 3) if bf16 else packed.transpose(1, 2)
    flat = columns_first.reshape(len(packed) * PANEL, -1)
    assert torch.equal(flat[:columns, :inputs], weight)
    assert not flat[columns:].any() and not flat[:, inputs:].any()


def test_no_rows() -> None:
    assert PackedLinear(draw(0, 50, 20))(torch.empty(0, 20)).shape == (0, 50)


def test_wrong_operands_are_refused() -> None:
    layer = PackedLinear(draw(0, 50, 20))
    for x, out in [
        (draw(1, 3, 21), torch.empty(3, 50)),
        (draw(1, 3, 20), torch.empty(2, 50)),
        (draw(1, 3, 20), torch.empty(3, 49 + PANEL)),
        (draw(1, 20, 3).T, torch.empty(3, 50)),
        (draw(1, 3, 20).double(), torch.empty(3, 50)),
        (draw(1, 3, 20), torch.empty(3, 50, dtype=torch.bfloat16)),
    ]:
        with pytest.raises(RuntimeError):
            layer.into(x, out)


def test_layers_are_packed_and_never_padded() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        layer = make_linear(draw(0, 50, 20).to(dtype), None, torch.float32)
        assert isinstance(layer, PackedLinear)
        assert smallest_rows([layer]) == 1
    assert [padded_rows(rows, 1) for rows in (0, 1, 7, 250)] == [0, 1, 7, 250]
