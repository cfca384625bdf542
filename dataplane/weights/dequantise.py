"""Values of quantised blocks: as float32, or as weights in 4 bits where they are held so.

The common types are widened here, the rare ones by the gguf package.

The two give the same bits; this one is several times faster, which is seconds of a server's start.
"""

import numpy as np
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.quantised import GROUP, Int4Weight

_T = GGMLQuantizationType
#: Tensor types that are dequantised; others are refused when the file is opened.
SUPPORTED_TYPES = (
    *(_T.F32, _T.F16, _T.BF16, _T.Q4_0, _T.Q4_1, _T.Q5_0, _T.Q5_1, _T.Q8_0),
    *(_T.Q2_K, _T.Q3_K, _T.Q4_K, _T.Q5_K, _T.Q6_K, _T.IQ4_NL, _T.IQ4_XS),
)
#: Types that are weights in 4 bits with a scale and a minimum for each 32.
FOUR_BITS = (_T.Q4_0, _T.Q4_1, _T.Q4_K)


def widen(raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Tensor:
    """float32 tensor of ``shape`` from a tensor's bytes."""
    if kind in (_T.F32, _T.F16):
        stored = np.array(raw.view(np.float32 if kind == _T.F32 else np.float16), dtype=np.float32)
        return torch.from_numpy(stored).view(shape)
    if kind == _T.Q4_1:
        return _q4_1(raw).view(shape)
    if kind == _T.Q8_0:
        return _q8_0(raw).view(shape)
    rows = raw.reshape(*shape[:-1], -1)
    return torch.from_numpy(np.array(dequantize(rows, kind), dtype=np.float32, order="C")).view(shape)


def _q4_1(raw: NDArray[np.uint8]) -> Tensor:
    """Blocks of 32: scale and minimum (half), then 16 bytes whose low nibbles are the first 16 values."""
    blocks = torch.from_numpy(raw.copy()).view(-1, 20)
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).to(torch.float32).chunk(2, dim=1)
    values = torch.empty(len(blocks), 32)
    values[:, :16] = blocks[:, 4:] & 15
    values[:, 16:] = blocks[:, 4:] >> 4
    return values.mul_(scale).add_(minimum)


def _q8_0(raw: NDArray[np.uint8]) -> Tensor:
    """Blocks of 32: scale (half), then 32 signed bytes."""
    blocks = torch.from_numpy(raw.copy()).view(-1, 34)
    scale = blocks[:, :2].contiguous().view(torch.float16).to(torch.float32)
    return blocks[:, 2:].view(torch.int8).to(torch.float32).mul_(scale)


def four_bits(raw: NDArray[np.uint8], kind: GGMLQuantizationType, shape: tuple[int, ...]) -> Int4Weight:
    """A matrix of one of ``FOUR_BITS``. Of Q4_K, scales and minima are rounded to half precision."""
    if kind == _T.Q4_K:
        values, scales, minima = _q4_k(torch.from_numpy(raw.copy()).view(-1, 144))
    else:
        # A half for the scale, with Q4_1 one for the minimum, then 16 bytes as in ``_q4_1``.
        blocks = torch.from_numpy(raw.copy()).view(-1, 18 if kind == _T.Q4_0 else 20)
        halves = blocks[:, :-16].contiguous().view(torch.float16)
        values = torch.cat((blocks[:, -16:] & 15, blocks[:, -16:] >> 4), 1)
        scales = halves[:, 0]
        # Q4_0 counts from 8.
        minima = halves[:, 1] if kind == _T.Q4_1 else scales * -8
    groups = (shape[0], shape[1] // GROUP)
    return Int4Weight(values.view(shape), scales.reshape(groups), minima.reshape(groups))


def _q4_k(blocks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Values, scales and minima of blocks of 256, 32 of which share 6 bits for each.

    A block: halves that these 6 bits are multiples of, 12 bytes of them, and 4 times 32 bytes of two values.
    """
    scale, minimum = blocks[:, :4].contiguous().view(torch.float16).to(torch.float32).chunk(2, 1)
    first, second, third = blocks[:, 4:16].split(4, 1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), 1).to(torch.float32) * scale
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), 1).to(torch.float32) * -minimum
    bytes_of = blocks[:, 16:].view(-1, 4, 32)
    values = torch.stack((bytes_of & 15, bytes_of >> 4), 2)
    return values, scales.to(torch.float16), minima.to(torch.float16)
