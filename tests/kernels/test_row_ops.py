"""Norm, activation and rotary positions against plain formulas; bits that do not depend on the batch."""

import pytest
import torch
from evenflow.kernels.norm import rms_norm, silu_mul
from evenflow.kernels.rope import RopeTable, apply_rope, base_frequencies
from torch.nn import functional


def test_rms_norm_and_activation_equal_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(5, 96, generator=generator), torch.randn(96, generator=generator)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, torch.float32), functional.rms_norm(x, (96,), weight, 1e-5))
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(silu_mul(x), functional.silu(gate) * up)


def test_activation_of_extreme_values_is_finite() -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]])
    assert silu_mul(gate_up).tolist() == [[0.0, 1e4, 0.0]]


def test_rope_rotates_by_position() -> None:
    cos, sin = RopeTable(base_frequencies(8, 100.0), 50).rows(torch.arange(50))
    x = torch.randn(3, 2, 8, generator=torch.Generator().manual_seed(0))
    positions = torch.tensor([0, 7, 49])
    rotated = apply_rope(x, cos[positions], sin[positions])
    assert torch.equal(rotated[0], x[0])
    for row, position in ((1, 7), (2, 49)):
        pairs = torch.complex(x[row, :, :4].double(), x[row, :, 4:].double())
        angle = position * 100.0 ** (-torch.arange(4).double() / 4)
        turned = pairs * torch.polar(torch.ones_like(angle), angle)
        torch.testing.assert_close(
            rotated[row].double(), torch.cat((turned.real, turned.imag), -1), atol=1e-5, rtol=0
        )


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_rows(threads: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(250, 2 * 600, generator=generator).to(dtype)
    weight = torch.randn(1200, generator=generator)
    cos, sin = RopeTable(base_frequencies(40, 1e4), 300).rows(torch.arange(300))
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        heads = x.view(250, 30, 40)
        whole = rms_norm(x, weight, 1e-5, dtype), silu_mul(x), apply_rope(heads, cos[:250], sin[:250])
        torch.set_num_threads(1)
        for row in (0, 83, 123, 249):
            at = slice(row, row + 1)
            alone = rms_norm(x[at], weight, 1e-5, dtype), silu_mul(x[at]), apply_rope(heads[at], cos[at], sin[at])
            for one, other in zip(whole, alone, strict=True):
                assert torch.equal(one[at], other)
    finally:
        torch.set_num_threads(before)
