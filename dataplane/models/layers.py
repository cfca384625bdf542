"""A decoder layer's weights, and a stage's layers computed by one operation each.

Taken apart, a layer is nine operations in C++ with as many calls from Python and new tensors between them, which for
one decode cost a sixth of the iteration. ``torch.ops.evenflow.layer`` runs the same nine in the same order over
memory that is kept, so results have the same bits.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import cpu
from ...kernels.attention import AttnBatch, KVCache
from ...kernels.linear import AnyLinear
from ...kernels.packed import PackedLinear
from ...kernels.quantised import Int4Linear, Int8Linear
from .config import LlamaConfig

AnyLayer = AnyLinear | Int8Linear | Int4Linear
#: Those that the C++ kernels compute.
Packed = PackedLinear | Int8Linear | Int4Linear


@dataclass(slots=True)
class Layer:
    attention_norm: Tensor
    qkv: AnyLayer
    output: AnyLayer
    mlp_norm: Tensor
    gate_up: AnyLayer
    down: AnyLayer
    #: Weights of the norm of each query and key head, [heads + kv_heads, head_dim].
    qk_norm: Tensor | None
    #: Keys that a query sees, 0 for all.
    window: int

    @property
    def linears(self) -> tuple[AnyLayer, ...]:
        return self.qkv, self.output, self.gate_up, self.down


class FusedLayers:
    """See the module. For a cache in the layout of ``NativeAttention``."""

    def __init__(self, layers: Sequence[Layer], config: LlamaConfig) -> None:
        """``layers`` must be ``fusable``."""
        self._config = config
        self._windows = [layer.window for layer in layers]
        self._weights = [_weights(layer) for layer in layers]
        heads, dim = config.heads, config.head_dim
        #: Columns of what a layer keeps: the normed stream, queries to values, attention's result, gates, gated.
        self._columns = (
            config.hidden_size,
            (heads + 2 * config.kv_heads) * dim,
            heads * dim,
            2 * config.ffn_size,
            config.ffn_size,
            config.hidden_size,
        )
        self._memory = [torch.empty(0, columns) for columns in self._columns]

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, batch: AttnBatch) -> Tensor:
        """Run all layers over ``x`` [T, hidden], which is overwritten; what is yet to be added to it, float32[T,
        hidden], valid until the next call."""
        rows = len(x)
        if rows > len(self._memory[0]):
            self._memory = [torch.empty(rows, columns) for columns in self._columns]
        *between, delta = (memory[:rows] for memory in self._memory)
        eps, scale = self._config.norm_eps, self._config.head_dim**-0.5
        for index, weights in enumerate(self._weights):
            torch.ops.evenflow.layer(
                x,
                index > 0,
                delta,
                *weights,
                cos,
                sin,
                batch.slot,
                cache.keys[index],
                cache.values[index],
                batch.cu_q,
                batch.kv_len,
                batch.block_table,
                eps,
                scale,
                self._windows[index],
                *between,
            )
        return delta


def fusable(layers: Sequence[Layer]) -> bool:
    """Whether one operation can compute each of these layers."""
    return cpu.available() and all(
        layer.qk_norm is None and all(isinstance(linear, Packed) for linear in layer.linears) for layer in layers
    )


def _weights(layer: Layer) -> tuple[Tensor | None, ...]:
    """In the order of the operation's arguments."""
    qkv, output, gate_up, down = (linear for linear in layer.linears if isinstance(linear, Packed))
    return (
        layer.attention_norm,
        *(qkv.packed, qkv.bias),
        *(output.packed, output.bias),
        layer.mlp_norm,
        *(gate_up.packed, gate_up.bias),
        *(down.packed, down.bias),
    )
