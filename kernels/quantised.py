"""Linear layers over weights in 8 or 4 bits.

Weights in 8 bits are whole numbers of -127 … 127 with a scale for each ``GROUP`` inputs of an output, as GGUF's Q8_0
holds them; weights in 4 bits are 0 … 15 with a scale and a minimum, as Q4_0 and Q4_1 do. Scales and minima are in
half precision. Activations become whole numbers of -127 … 127 in a call, by the largest of each group. (One scale for
a whole row would cost SmolLM2 several percent of perplexity, groups of 64 cost it 1.1 %, of 32 0.7 %.) Products of a
group are summed as whole numbers; groups are scaled and added in order, by operations that round each. So a row's
bits depend on nothing else: neither on the other rows and threads, nor on the instruction set, nor on whether it is
the C++ kernels that compute (``cpu/whole.h``) or, without a compiler, operations of torch here.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from . import cpu
from .packed import PANEL

#: Inputs that share a scale, as in ``cpu/level.h``. Sums of their products are exact in float32.
GROUP = 32
#: Inputs that lie beside each other in packed weights of 8 bits: two groups.
_RUN8 = 2 * GROUP
_LARGEST = 127
#: Below this, the inverse of a group's largest value is no finite number, and the group counts as zeros.
_LEAST = 1e-30
#: Bytes of packed weights before the weights: scales of two groups, or scales and minima of one.
_HEADER = 4 * PANEL
#: The range that 15 steps span, as parts of the values' own: values at the ends may lie outside if the others gain.
_SPANS = (1.0, 0.94, 0.88, 0.82)


def _spread(of_groups: Tensor, count: int) -> Tensor:
    """What each group of ``size`` has, for each of ``count`` inputs: float32[out, count]."""
    return of_groups.to(torch.float32).repeat_interleave(GROUP, 1)[:, :count]


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """``values`` int8[out, in] times ``scales`` float16[out, groups]. The last group may be shorter."""

    values: Tensor
    scales: Tensor

    def dequantised(self) -> Tensor:
        """float32[out, in]."""
        return self.values.to(torch.float32).mul_(_spread(self.scales, self.values.shape[1]))


@dataclass(frozen=True, slots=True)
class Int4Weight:
    """``values`` uint8[out, in], 0 … 15, times ``scales`` plus ``minima``, both float16[out, groups].

    The last group may be shorter.
    """

    values: Tensor
    scales: Tensor
    minima: Tensor

    def dequantised(self) -> Tensor:
        """float32[out, in]."""
        count = self.values.shape[1]
        scaled = self.values.to(torch.float32).mul_(_spread(self.scales, count))
        return scaled.add_(_spread(self.minima, count))


def _in_groups(weight: Tensor) -> Tensor:
    """float32[out, groups, GROUP]; the last group is filled up by a value of its own, which widens no range."""
    wide = weight.to(torch.float32)
    short = -wide.shape[1] % GROUP
    if short:
        wide = torch.cat((wide, wide[:, -1:].expand(-1, short)), 1)
    return wide.view(len(wide), -1, GROUP)


def quantise8(weight: Tensor) -> Int8Weight:
    """The nearest in 8 bits to ``weight`` [out, in]."""
    groups = _in_groups(weight)
    scales = (groups.abs().amax(2) / _LARGEST).to(torch.float16)
    # The scale as it is stored counts.
    step = scales.to(torch.float32)
    inverse = torch.where(step > 0, 1.0 / step, 0.0)
    values = (groups * inverse[..., None]).round_().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
    return Int8Weight(values.view(len(weight), -1)[:, : weight.shape[1]], scales)


def quantise4(weight: Tensor) -> Int4Weight:
    """In 4 bits, close to ``weight`` [out, in]: of a few scales for each group that with the least squared error."""
    groups = _in_groups(weight)
    low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    best, error = None, None
    for span in _SPANS:
        spared = (high - low) * ((1.0 - span) / 2)
        minima = (low + spared).to(torch.float16)
        # The minimum as it is stored counts.
        scales = ((high - spared - minima.to(torch.float32)) / 15).clamp_(min=0.0).to(torch.float16)
        step, least = scales.to(torch.float32), minima.to(torch.float32)
        inverse = torch.where(step > 0, 1.0 / step, 0.0)
        values = ((groups - least) * inverse).round_().clamp_(0, 15)
        missed = (values * step + least).sub_(groups).square_().sum(2, keepdim=True)
        if best is None or error is None:
            best, error = (values, scales, minima), missed
            continue
        better = missed < error
        pairs = zip((values, scales, minima), best, strict=True)
        best, error = tuple(torch.where(better, new, old) for new, old in pairs), torch.minimum(error, missed)
    assert best is not None
    values, scales, minima = best
    whole = values.to(torch.uint8).view(len(weight), -1)[:, : weight.shape[1]]
    return Int4Weight(whole, scales.squeeze(2), minima.squeeze(2))


def pack8(weight: Int8Weight) -> Tensor:
    """uint8[panels, runs, (4 + _RUN8) * PANEL]; ``cpu/whole.h`` has the order."""
    columns, inputs = weight.values.shape
    panels, runs = -(-columns // PANEL), -(-inputs // _RUN8)
    # 128 stands for 0.
    whole = torch.full((panels * PANEL, runs * _RUN8), 128, dtype=torch.uint8)
    whole[:columns, :inputs] = weight.values.view(torch.uint8) ^ 128
    words = whole.view(torch.int32).view(panels, PANEL, runs, _RUN8 // 4).permute(0, 2, 3, 1)
    scales = torch.zeros(panels * PANEL, runs * 2, dtype=torch.float16)
    scales[:columns, : weight.scales.shape[1]] = weight.scales
    first = scales.view(panels, PANEL, runs, 2).permute(0, 2, 3, 1).reshape(panels, runs, -1)
    return torch.cat((first.view(torch.uint8), words.reshape(panels, runs, -1).view(torch.uint8)), 2)


def pack4(weight: Int4Weight) -> Tensor:
    """uint8[panels, groups, (4 + GROUP / 2) * PANEL]; ``cpu/whole.h`` has the order."""
    columns, inputs = weight.values.shape
    panels, groups = -(-columns // PANEL), weight.scales.shape[1]
    whole = torch.zeros(panels * PANEL, groups * GROUP, dtype=torch.uint8)
    whole[:columns, :inputs] = weight.values
    # [panels, columns, groups, steps, lower and upper halves, 4]
    halves = whole.view(panels, PANEL, groups, GROUP // 8, 2, 4)
    bytes_of = halves[..., 0, :] | halves[..., 1, :] << 4
    packed = torch.empty(panels, groups, _HEADER + PANEL * GROUP // 2, dtype=torch.uint8)
    packed[..., _HEADER:] = bytes_of.permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)
    for place, part in enumerate((weight.scales, weight.minima)):
        padded = torch.zeros(panels * PANEL, groups, dtype=torch.float16)
        padded[:columns] = part
        raw = padded.view(panels, PANEL, groups).transpose(1, 2).contiguous().view(torch.uint8)
        packed[..., place * 2 * PANEL : (place + 1) * 2 * PANEL] = raw
    return packed


def _whole(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` [..., n] as whole numbers, in float32, and their scale [..., 1]."""
    largest = x.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest >= _LEAST, _LARGEST / largest, 0.0)
    return (x * inverse).round_(), largest / _LARGEST


class Int8Linear:
    """``x @ weight.T + bias`` for ``x`` float32[rows, in], with weights in 8 bits."""

    __slots__ = ("_plain", "bias", "in_features", "out_features", "packed")

    def __init__(self, weight: Int8Weight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        #: The weights of operations of torch.
        self._plain: Int8Weight | None = None
        self.packed = torch.empty(0)
        if cpu.available():
            self.packed = pack8(weight)
        else:
            self._plain = weight

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        if self._plain is None:
            return self.packed.nbytes
        return self._plain.values.nbytes + self._plain.scales.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.out_features)
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """As a call, into ``out`` float32[rows, out]. Rows of either may be apart."""
        if self._plain is None:
            torch.ops.evenflow.matmul8(x, self.packed, self.bias, out)
            return
        result = torch.zeros(len(x), self.out_features)
        scales = self._plain.scales.to(torch.float32).T
        for group, begin in enumerate(range(0, self.in_features, GROUP)):
            values, scale = _whole(x[:, begin : begin + GROUP])
            weight = self._plain.values[:, begin : begin + GROUP].to(torch.float32)
            result += (values @ weight.T).mul_(scale).mul_(scales[group])
        out.copy_(result if self.bias is None else result.add_(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of these outputs, float32[ids, in]: an embedding."""
        if self._plain is not None:
            return Int8Weight(self._plain.values[ids], self._plain.scales[ids]).dequantised()
        panel, column = ids // PANEL, ids % PANEL
        weights = self.packed[..., _HEADER:].unflatten(-1, (_RUN8 // 4, PANEL, 4))[panel, :, :, column]
        values = (weights.reshape(len(ids), -1)[:, : self.in_features] ^ 128).view(torch.int8)
        halves = self.packed.view(torch.float16)
        scales = torch.stack((halves[panel, :, column], halves[panel, :, PANEL + column]), 2)
        return Int8Weight(values, scales.flatten(1)).dequantised()


class Int4Linear:
    """``x @ weight.T + bias`` for ``x`` float32[rows, in], with weights in 4 bits."""

    __slots__ = ("_plain", "bias", "in_features", "out_features", "packed")

    def __init__(self, weight: Int4Weight, bias: Tensor | None = None) -> None:
        self.out_features, self.in_features = weight.values.shape
        self.bias = None if bias is None else bias.to(torch.float32).contiguous()
        self._plain: Int4Weight | None = None
        self.packed = torch.empty(0)
        if cpu.available():
            self.packed = pack4(weight)
        else:
            self._plain = weight

    @property
    def num_bytes(self) -> int:
        """Of the weights."""
        if self._plain is None:
            return self.packed.nbytes
        return self._plain.values.nbytes + self._plain.scales.nbytes + self._plain.minima.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.out_features)
        self.into(x, out)
        return out

    def into(self, x: Tensor, out: Tensor) -> None:
        """As a call, into ``out`` float32[rows, out]. Rows of either may be apart."""
        if self._plain is None:
            torch.ops.evenflow.matmul4(x, self.packed, self.bias, out)
            return
        result = torch.zeros(len(x), self.out_features)
        scales, minima = self._plain.scales.to(torch.float32).T, self._plain.minima.to(torch.float32).T
        for group, begin in enumerate(range(0, self.in_features, GROUP)):
            values, scale = _whole(x[:, begin : begin + GROUP])
            weight = self._plain.values[:, begin : begin + GROUP].to(torch.float32)
            result += (values @ weight.T).mul_(scale).mul_(scales[group])
            result += values.sum(1, keepdim=True).mul_(scale) * minima[group]
        out.copy_(result if self.bias is None else result.add_(self.bias))

    def rows(self, ids: Tensor) -> Tensor:
        """The weights of these outputs, float32[ids, in]: an embedding."""
        if self._plain is not None:
            plain = self._plain
            return Int4Weight(plain.values[ids], plain.scales[ids], plain.minima[ids]).dequantised()
        panel, column = ids // PANEL, ids % PANEL
        weights = self.packed[..., _HEADER:].unflatten(-1, (GROUP // 8, PANEL, 4))[panel, :, :, column]
        values = torch.stack((weights & 15, weights >> 4), dim=3).view(len(ids), -1)[:, : self.in_features]
        halves = self.packed.view(torch.float16)
        scales, minima = halves[panel, :, column], halves[panel, :, PANEL + column]
        return Int4Weight(values, scales, minima).dequantised()


def relative_error(wanted: Tensor, found: Tensor) -> float:
    """Root of the mean squared difference, as a part of the root of the mean square."""
    size = float(torch.linalg.vector_norm(wanted))
    return float(torch.linalg.vector_norm(found - wanted)) / size if size else 0.0
