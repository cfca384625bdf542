"""Rotary position embedding in the order of Hugging Face checkpoints: a head's first half pairs with its second."""

import torch
from torch import Tensor


def rope_table(head_dim: int, theta: float, positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions 0 … ``positions`` - 1, each float32[positions, 1, head_dim / 2]."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float32) / head_dim
    frequencies = 1.0 / (theta**exponents)
    angles = torch.arange(positions, dtype=torch.float32)[:, None] * frequencies
    return angles.cos()[:, None, :].contiguous(), angles.sin()[:, None, :].contiguous()


def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``x`` [T, heads, head_dim]; ``cos`` and ``sin`` [T, 1, head_dim / 2] are the rows' own."""
    first, second = x.to(torch.float32).chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)
