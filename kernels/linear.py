"""Linear layers whose rows never depend on how many rows there are.

``make_linear`` chooses one of two kinds. ``PackedLinear`` (``packed``) is the C++ kernel: weights of either type are
read as they are, and a row's bits are the same at every size. ``Linear`` is oneDNN, where there is no C++ kernel.

oneDNN may use another kernel, and so another order of additions, for another number of rows. So callers pad the
number of rows to one of a few sizes (``padded_rows``), which also keeps the number of generated kernels small.
``smallest_rows`` finds out on the running machine from which size on a row's bits are always the same. bfloat16
products would be emulated where the processor has no instructions for them, several times slower than float32, so
the packed weights are float32 copies of the bfloat16 values there.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from . import cpu
from .packed import PackedLinear

#: From here on, row counts are multiples of this; below, powers of two.
ROW_TILE = 16
_SMALL = (2, 4, 8)
#: Sizes that the check compares.
_CHECKED = (*_SMALL, ROW_TILE, 3 * ROW_TILE, 128)


def padded_rows(rows: int, smallest: int = ROW_TILE) -> int:
    """The number of rows to compute for ``rows`` rows, at least ``smallest``; 1: these very rows."""
    if smallest == 1:
        return rows
    if rows > ROW_TILE // 2:
        return -(-rows // ROW_TILE) * ROW_TILE
    return next((size for size in _SMALL if size >= max(rows, smallest)), ROW_TILE)


def multiplies_bfloat16() -> bool:
    """Whether this processor has instructions for products of bfloat16."""
    return torch.cpu._is_avx512_bf16_supported()


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of what layers of a model in ``dtype`` give each other on this processor. The C++ kernels take
    float32, which for weights in bfloat16 they round themselves where the processor multiplies that."""
    if dtype is torch.bfloat16 and (cpu.available() or not multiplies_bfloat16()):
        return torch.float32
    return dtype


class Linear:
    """``x @ weight.T + bias`` for ``x`` [padded rows, in], with the weight [out, in] packed in the compute type."""

    __slots__ = ("_bias", "_packed", "dtype", "in_features", "out_features")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.dtype = weight.dtype
        self._bias = bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous())

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self._bias, "none", [], "")


AnyLinear = Linear | PackedLinear


def make_linear(weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> AnyLinear:
    """The layer of ``weight`` [out, in] and ``bias`` [out] for rows in ``compute``, the quickest that is here."""
    if compute is torch.float32 and weight.dtype in (torch.float32, torch.bfloat16) and cpu.available():
        return PackedLinear(weight, bias)
    return Linear(weight.to(compute), None if bias is None else bias.to(compute))


def smallest_rows(layers: Sequence[AnyLinear]) -> int | None:
    """The least size from which on every row of these layers has the same bits at every size.

    None if not even multiples of ``ROW_TILE`` agree: then a row's result may depend on the batch.
    """
    checked = [layer for layer in layers if isinstance(layer, Linear)]
    return _smallest_checked(checked) if checked else 1


def _smallest_checked(layers: Iterable[Linear]) -> int | None:
    smallest = 0
    for layer in layers:
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(_CHECKED[-1], layer.in_features, generator=generator).to(layer.dtype)
        expected = layer(rows)
        for size in _CHECKED:
            if not torch.equal(layer(rows[:size].contiguous()), expected[:size]):
                smallest = max(smallest, size + 1)
    if smallest > ROW_TILE:
        return None
    return next(size for size in _CHECKED if size >= smallest)
