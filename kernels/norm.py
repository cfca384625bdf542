"""RMSNorm and the gated activation: operations in which each row stands alone."""

import torch
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Scale each row to unit mean square, then by ``weight`` (float32); computed so, returned in ``dtype``."""
    wide = x.to(torch.float32)
    inverse = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(eps))
    return (wide * inverse).mul_(weight).to(dtype)


def silu_mul(gate_up: Tensor) -> Tensor:
    """``silu(gate) * up`` for rows that hold the gate's columns first, then the up projection's.

    Written with ``exp`` and exact operations: torch's own ``silu`` rounds the last few elements of a thread's share
    differently, so that a row's bits would depend on how many rows there are.
    """
    gate, up = gate_up.chunk(2, dim=-1)
    gate = gate.to(torch.float32)
    return gate.neg().exp_().add_(1.0).reciprocal_().mul_(gate).mul_(up).to(gate_up.dtype)
