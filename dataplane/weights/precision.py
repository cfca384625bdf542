"""What ``--dtype`` names, and the layers of a model in that precision.

bfloat16 and float32 are the type of weights, of the residual stream and of the KV cache. int8 and int4 are of weights
only, and the rest is as for bfloat16. In int8 every matrix has 8 bits. In int4 a matrix that the file holds in 4 bits
is used as it is, one that it holds in a floating type is rounded to 4 bits, or to 8 if it is the embedding or the
head, and any other has 8 bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels.quantised import (
    Int4Linear,
    Int4Weight,
    Int8Linear,
    Int8Weight,
    quantise4,
    quantise8,
    relative_error,
)
from ..models.config import EMBEDDING, HEAD, ModelError
from .source import ModelSource

#: Files hold a weight in so many bits or more if it is in a floating type.
_FLOATING = 16


@dataclass(frozen=True, slots=True)
class Precision:
    #: Of the residual stream, the KV cache, and weights that are not rounded.
    stream: torch.dtype
    #: Of rounded weights; 0: none are.
    bits: int = 0


PRECISIONS = {
    "bfloat16": Precision(torch.bfloat16),
    "float32": Precision(torch.float32),
    "int8": Precision(torch.bfloat16, 8),
    "int4": Precision(torch.bfloat16, 4),
}


def precision_of(name: str) -> Precision:
    if name not in PRECISIONS:
        raise ModelError(f"dtype {name} is not supported; supported: {', '.join(PRECISIONS)}")
    return PRECISIONS[name]


class Quantiser:
    """Makes the layers of one stage, of 8 or 4 bits, and keeps account of what rounding them lost."""

    def __init__(self, source: ModelSource, bits: int) -> None:
        self._source = source
        self._bits = bits
        self._bytes: dict[int, int] = {8: 0, 4: 0}
        self._worst: tuple[float, str] = (0.0, "")

    def layer(self, names: Sequence[str], bias: Tensor | None = None) -> Int8Linear | Int4Linear:
        """For the rows of all of these tensors, one below the other."""
        # Those that are computed together have the bits of the one that needs most.
        bits = max(self._wanted(name) for name in names)
        parts = [self._weight(name, bits) for name in names]
        made: Int8Linear | Int4Linear
        if isinstance(parts[0], Int8Weight):
            eights = [part for part in parts if isinstance(part, Int8Weight)]
            values = torch.cat([part.values for part in eights])
            made = Int8Linear(Int8Weight(values, torch.cat([part.scales for part in eights])), bias)
        else:
            fours = [part for part in parts if isinstance(part, Int4Weight)]
            made = Int4Linear(
                Int4Weight(
                    torch.cat([part.values for part in fours]),
                    torch.cat([part.scales for part in fours]),
                    torch.cat([part.minima for part in fours]),
                ),
                bias,
            )
        self._bytes[8 if isinstance(made, Int8Linear) else 4] += made.num_bytes
        return made

    def _wanted(self, name: str) -> int:
        if self._bits == 8 or self._source.has_int4(name):
            return self._bits
        return 4 if self._source.bits(name) >= _FLOATING and name not in (EMBEDDING, HEAD) else 8

    def _weight(self, name: str, bits: int) -> Int8Weight | Int4Weight:
        if bits == 4 and self._source.has_int4(name):
            return self._source.load_int4(name)
        wanted = self._source.load(name)
        if not bool(torch.isfinite(wanted.sum(dtype=torch.float32))):
            raise ModelError(f"tensor {name} of {self._source.name} holds values that are not finite")
        made = quantise8(wanted) if bits == 8 else quantise4(wanted)
        self._worst = max(self._worst, (relative_error(wanted, made.dequantised()), name))
        return made

    def report(self) -> str:
        """One line: what the weights take, and what was lost."""
        sizes = [f"{count / 1e6:.1f} MB in {bits} bits" for bits, count in self._bytes.items() if count]
        error, name = self._worst
        lost = f"; rounding changed {name} most, by {error:.2%} of its size" if name else "; none was rounded"
        return f"weights: {' and '.join(sizes)}{lost}"
