"""Linear layers over weights packed for the C++ matrix product (``cpu/matmul.h``).

Weights stay in their own type, float32 or bfloat16, and are read once for all rows; activations, products and sums
are float32, but for activations that meet weights in bfloat16: they are rounded to that where the processor
multiplies it. Every element of a result is one chain of additions over the inputs, so a row's bits never depend on
how many rows there are, nor on threads: there is no size to pad to.
"""

import torch
from torch import Tensor

#: Columns that lie together, as in ``cpu/level.h``.
PANEL = 48


def pack(weight: Tensor) -> Tensor:
    """``weight`` [out, in], float32 or bfloat16, in panels of columns.

    float32: [panels, in, PANEL]. bfloat16: [panels, in / 2 rounded up, PANEL, 2], where two of a column's inputs are
    side by side. Columns and inputs that are added are zeros.
    """
    columns, inputs = weight.shape
    panels = -(-columns // PANEL)
    each = 2 if weight.dtype is torch.bfloat16 else 1
    steps = -(-inputs // each)
    packed = torch.zeros(panels, steps, PANEL, each, dtype=weight.dtype)
    whole = weight.new_zeros(panels * PANEL, steps * each)
    whole[:columns, :inputs] = weight
    # A pair of bfloat16 is moved as one word.
    words = whole.view(torch.int32).view(panels, PANEL, steps).transpose(1, 2)
    packed.view(torch.int32).view(panels, steps, PANEL).copy_(words)
    return packed


class PackedLinear:
    """``x @ weight.T + bias`` for ``x`` float32[rows, in]."""

    __slots__ = ("bias", "in_features", "out_features", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.shape
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        self.packed = pack(weight)

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.out_features)
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """As a call, into ``out`` float32[rows, out]. Rows of either may be apart."""
        torch.ops.evenflow.matmul(x, self.packed, self.bias, out)
