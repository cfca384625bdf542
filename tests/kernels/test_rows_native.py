"""Norm and activation in C++ at every level, against float64, over tails and gaps; bits that stand alone."""

from collections.abc import Iterator

import pytest
import torch
from evenflow.kernels import cpu
from evenflow.kernels.norm import add_norm, silu_mul
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

pytestmark = pytest.mark.skipif(not cpu.available(), reason="the C++ kernels cannot be built here")
LEVELS = cpu.levels() if cpu.available() else []


@pytest.fixture(autouse=True)
def best_level() -> Iterator[None]:
    yield
    cpu.use_level(LEVELS[-1])


def draw(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def apart(values: Tensor) -> Tensor:
    """The same rows in wider memory that is NaN beside them."""
    memory = torch.full((values.shape[0], values.shape[1] + 3), torch.nan, dtype=values.dtype)
    memory[:, 1:-2] = values
    return memory[:, 1:-2]


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 70), st.booleans(), st.booleans(), st.integers(0, 9))
def test_norm_equals_float64(level: str, rows: int, size: int, bf16: bool, changed: bool, seed: int) -> None:
    assert cpu.use_level(level)
    x = apart(draw(seed, rows, size).to(torch.bfloat16 if bf16 else torch.float32))
    delta = apart(draw(seed + 1, rows, size)) if changed else None
    weight = draw(seed + 2, size)
    # torch rounds the sum as the residual stream is stored, and the norm is of what is stored.
    summed = x.clone() if delta is None else (x.float() + delta).to(x.dtype)
    out = torch.full((rows, size), torch.nan)
    torch.ops.evenflow.norm(x, delta, weight, 1e-5, out)
    assert torch.equal(x, summed)
    wide = summed.double()
    wanted = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    torch.testing.assert_close(out.double(), wanted, atol=1e-6, rtol=2e-6)


@pytest.mark.parametrize("level", LEVELS)
@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(1, 70), st.floats(0.1, 60), st.integers(0, 9))
def test_activation_equals_float64(level: str, rows: int, size: int, spread: float, seed: int) -> None:
    assert cpu.use_level(level)
    x = apart(draw(seed, rows, 2 * size) * spread)
    gate, up = x.double().chunk(2, -1)
    wanted = functional.silu(gate) * up
    # The exponent is rounded once as a power of two, which counts for more the larger it is.
    bound = wanted.abs() * (1e-6 + gate.abs() * 2.0**-23) + 1e-30
    assert bool(((silu_mul(x).double() - wanted).abs() <= bound).all())


@pytest.mark.parametrize("level", LEVELS)
def test_activation_at_the_ends(level: str) -> None:
    assert cpu.use_level(level)
    gates = torch.tensor([[-1e30, -200.0, -87.0, 0.0, 87.0, 1e30]])
    found = silu_mul(torch.cat((gates, torch.ones_like(gates)), 1))
    assert found.isfinite().all()
    assert found[0, 0] == 0 and found[0, 3] == 0 and found[0, 5] == torch.tensor(1e30)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("threads", [1, 2])
def test_a_row_has_the_same_bits_in_every_batch(level: str, dtype: torch.dtype, threads: int) -> None:
    assert cpu.use_level(level)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        x, delta, weight = draw(0, 250, 602).to(dtype), draw(1, 250, 602), draw(2, 602)
        whole_x = x.clone()
        whole = add_norm(whole_x, delta, weight, 1e-5, torch.float32), silu_mul(delta)
        for row in (0, 83, 249):
            at = slice(row, row + 1)
            alone_x = x[at].clone()
            alone = add_norm(alone_x, delta[at], weight, 1e-5, torch.float32), silu_mul(delta[at])
            assert torch.equal(alone_x, whole_x[at])
            assert all(torch.equal(one[at], other) for one, other in zip(whole, alone, strict=True))
    finally:
        torch.set_num_threads(before)
