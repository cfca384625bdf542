"""RMSNorm and the gated activation: operations in which each row stands alone."""

import torch
from torch import Tensor

from . import cpu


def add_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Add ``delta`` to ``x`` [rows, size] in place, and return ``rms_norm`` of the sum in ``dtype``."""
    if dtype is torch.float32 and cpu.available():
        out = torch.empty(x.shape)
        torch.ops.evenflow.norm(x, delta, weight, eps, out)
        return out
    if delta is not None:
        x.add_(delta)
    return rms_norm(x, weight, eps, dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Scale each row to unit mean square, then by ``weight`` (float32); computed so, returned in ``dtype``."""
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * inverse).mul_(weight).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for rows that hold the gate's columns first, then the up projection's.

    In C++, or with ``exp`` and exact operations: torch's own ``silu`` rounds the last few elements of a thread's
    share differently, so that a row's bits would depend on how many rows there are.
    """
    if gate_up.dtype is torch.float32 and cpu.available():
        out = torch.empty(len(gate_up), gate_up.shape[1] // 2)
        torch.ops.evenflow.gate(gate_up, out)
        return out
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.to(torch.float32)
    return gate.neg().exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up).to(gate_up.dtype)
