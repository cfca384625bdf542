"""Linear layers: right, and each row the same at every padded size."""

import pytest
import torch
from evenflow.kernels.linear import ROW_TILE, Linear, multiplies_bfloat16, padded_rows, smallest_rows


def test_padded_sizes() -> None:
    assert [padded_rows(rows, 2) for rows in (0, 1, 2, 3, 5, 8, 9, 16, 17, 250)] == [
        *(2, 2, 2, 4, 8, 8, 16, 16, 32, 256)
    ]
    assert [padded_rows(rows) for rows in (1, 8, 15, 33)] == [16, 16, 16, 48]


@pytest.mark.parametrize("dtype", [torch.float32, *([torch.bfloat16] if multiplies_bfloat16() else [])])
@pytest.mark.parametrize("threads", [1, 2])
def test_rows_have_the_same_bits_at_every_size(dtype: torch.dtype, threads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for out_features, in_features in [(96, 64), (192, 576), (576, 1536)]:
            weight = torch.randn(out_features, in_features, generator=generator).to(dtype)
            layer = Linear(weight)
            smallest = smallest_rows([layer])
            assert smallest is not None and smallest <= ROW_TILE
            rows = torch.randn(512, in_features, generator=generator).to(weight.dtype)
            whole = layer(rows)
            wanted = rows.double() @ weight.double().T
            # One unit in the last place of the result's type, at the size of the terms.
            torch.testing.assert_close(
                whole.double(), wanted, atol=torch.finfo(weight.dtype).eps * in_features**0.5 * 8, rtol=1e-2
            )
            for size in (1, 2, 3, 7, 16, 17, 64, 250):
                padded = torch.zeros(padded_rows(size, smallest), in_features, dtype=weight.dtype)
                padded[:size] = rows[:size]
                assert torch.equal(layer(padded)[:size], whole[:size]), f"{size} rows"
    finally:
        torch.set_num_threads(before)
