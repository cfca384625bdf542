"""Linear layers whose rows never depend on how many rows there are.

A matrix product may use another kernel, and so another order of additions, for another number of rows. Weights are
packed once for oneDNN and callers pad the number of rows to ``padded_rows``; ``check_rows`` proves on the running
machine that a row's bits are then the same at every size (``kernels`` know no other rows: padding is ignored).

bfloat16 products are computed natively only where the processor has instructions for it. Elsewhere they would be
emulated, several times slower than float32, so the packed weights are float32 copies of the bfloat16 values.
"""

import torch
from torch import Tensor

#: Rows are padded to a multiple of this.
ROW_TILE = 16


def padded_rows(rows: int) -> int:
    """The number of rows to compute for ``rows`` rows."""
    return -(-rows // ROW_TILE) * ROW_TILE


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type in which layers of a model in ``dtype`` are computed on this processor."""
    if dtype is torch.bfloat16 and not torch.cpu._is_avx512_bf16_supported():
        return torch.float32
    return dtype


class Linear:
    """``x @ weight.T`` for ``x`` [padded rows, in], with the weight [out, in] packed in the compute type."""

    __slots__ = ("_packed", "in_features", "out_features")

    def __init__(self, weight: Tensor) -> None:
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")


def check_rows(layer: Linear, dtype: torch.dtype, sizes: tuple[int, ...] = (1, 16, 64, 512)) -> bool:
    """Whether the first row's bits are the same for each number of rows in ``sizes``, padded as in use."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(padded_rows(max(sizes)), layer.in_features, generator=generator).to(dtype)
    first = [layer(rows[: padded_rows(size)].contiguous())[0] for size in sizes]
    return all(torch.equal(row, first[0]) for row in first)
