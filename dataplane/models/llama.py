"""One pipeline stage of a Llama-family decoder: Llama, Mistral, Qwen2 and Qwen3 differ in ``LlamaConfig`` only.

Built once from a model source, called once an iteration by ``model_runner``. The residual stream is kept in the
model's type between layers and stages, so a model's bits do not depend on how its layers are split; inside a layer
values have the compute type (``kernels.linear.compute_dtype``). All row counts are padded (``padded``).
"""

from typing import Any

import torch
from torch import Tensor

from ...kernels.attention import AttentionBackend, KVCache
from ...kernels.attention_native import NativeAttention
from ...kernels.linear import ROW_TILE, AnyLinear, compute_dtype, make_linear, padded_rows, smallest_rows
from ...kernels.memory import lay_together
from ...kernels.norm import add_norm, rms_norm, silu_mul
from ...kernels.quantised import Int4Linear, Int8Linear
from ...kernels.rope import (
    DynamicRope,
    RopeTable,
    base_frequencies,
    llama3_frequencies,
    yarn_frequencies,
)
from ..weights.precision import Precision, Quantiser
from ..weights.source import ModelSource
from .config import EMBEDDING, FINAL_NORM, HEAD, LlamaConfig, ModelError, split_layers, tensor_shapes
from .layers import AnyLayer, FusedLayers, Layer, Packed, fusable


def make_rope(config: LlamaConfig) -> RopeTable | DynamicRope:
    """The rotary positions that the model's scaling asks for."""
    rope, dim, theta = config.rope, config.head_dim, config.rope_theta
    if rope.kind == "dynamic":
        return DynamicRope(dim, theta, rope.factor, rope.original_len, config.max_len)
    frequencies = base_frequencies(dim, theta)
    if rope.divisors:
        frequencies = frequencies / torch.tensor(rope.divisors)
    elif rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = llama3_frequencies(
            frequencies, rope.factor, rope.low_factor, rope.high_factor, rope.original_len
        )
    elif rope.kind == "yarn":
        frequencies = yarn_frequencies(
            dim, theta, rope.factor, rope.original_len, rope.beta_fast, rope.beta_slow, rope.truncate
        )
    return RopeTable(frequencies, config.max_len, rope.magnitude)


class LlamaStage:
    """The layers of one stage, with the embedding on the first and the head on the last."""

    def __init__(self, source: ModelSource, stage: int, stages: int, precision: Precision) -> None:
        self.config = source.config
        self.dtype = precision.stream
        self.layers = split_layers(self.config.layers, stages, self.config.head_in_layers)[stage]
        self.is_first, self.is_last = stage == 0, stage == stages - 1
        #: The type of values inside a layer: weights of few bits meet whole numbers made of float32.
        self.compute = torch.float32 if precision.bits else compute_dtype(self.dtype)
        self._source = source
        self._quantiser = Quantiser(source, precision.bits) if precision.bits else None
        self._rope = make_rope(self.config)
        self._shapes = tensor_shapes(self.config)
        self._embedding = self._embedding_rows() if self.is_first else None
        self._layers = [self._layer(index) for index in self.layers]
        self._norm: Tensor | None = None
        self._head: AnyLayer | None = None
        if self.is_last:
            self._norm = self._tensor(FINAL_NORM).to(torch.float32)
            self._head = self._head_layer()
        held = [*(linear for layer in self._layers for linear in layer.linears), self._head, self._embedding]
        lay_together([linear for linear in held if isinstance(linear, Packed)])
        self._fused = FusedLayers(self._layers, self.config) if fusable(self._layers) else None
        checked = [*self._layers[0].linears, *([self._head] if self._head else [])]
        # Whole numbers add up to the same in any order.
        smallest = 1 if self._quantiser else smallest_rows([each for each in checked if isinstance(each, AnyLinear)])
        #: Whether a row's result never depends on the batch on this machine.
        self.batch_invariant = smallest is not None
        self._smallest = smallest or ROW_TILE

    @property
    def report(self) -> str | None:
        """One line on weights of few bits."""
        return self._quantiser.report() if self._quantiser else None

    def _embedding_rows(self) -> Tensor | Int8Linear | Int4Linear:
        return self._quantiser.layer([EMBEDDING]) if self._quantiser else self._tensor(EMBEDDING)

    def _head_layer(self) -> AnyLayer:
        name = EMBEDDING if self.config.tied else HEAD
        shared = self._embedding if self.config.tied else None
        if self._quantiser:
            return self._quantiser.layer([name]) if shared is None or isinstance(shared, Tensor) else shared
        weight = shared if isinstance(shared, Tensor) else self._tensor(name)
        return make_linear(weight, None, self.compute)

    def _tensor(self, name: str) -> Tensor:
        tensor = self._source.load(name)
        shape = self._shapes[name]
        if tuple(tensor.shape) != shape:
            raise ModelError(f"tensor {name} has shape {tuple(tensor.shape)}, the model needs {shape}")
        tensor = tensor.to(self.dtype)
        if not bool(torch.isfinite(tensor.sum(dtype=torch.float32))):
            raise ModelError(f"tensor {name} of {self._source.name} holds values that are not finite in {self.dtype}")
        return tensor

    def _linear(self, *names: str) -> AnyLayer:
        """One layer for the rows of all of ``names``, one below the other, with their biases if they have any."""
        bias = None
        if f"{names[0]}.bias" in self._shapes:
            bias = torch.cat([self._tensor(f"{name}.bias") for name in names])
        if self._quantiser:
            return self._quantiser.layer([f"{name}.weight" for name in names], bias)
        weight = torch.cat([self._tensor(f"{name}.weight") for name in names])
        return make_linear(weight, bias, self.compute)

    def _qk_norm(self, attention: str) -> Tensor:
        heads = (("q_norm", self.config.heads), ("k_norm", self.config.kv_heads))
        rows = [self._tensor(f"{attention}{name}.weight").expand(count, -1) for name, count in heads]
        return torch.cat(rows).to(torch.float32)

    def _layer(self, index: int) -> Layer:
        prefix = f"model.layers.{index}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        return Layer(
            attention_norm=self._tensor(prefix + "input_layernorm.weight").to(torch.float32),
            qkv=self._linear(*(f"{attention}{part}_proj" for part in "qkv")),
            output=self._linear(attention + "o_proj"),
            mlp_norm=self._tensor(prefix + "post_attention_layernorm.weight").to(torch.float32),
            gate_up=self._linear(mlp + "gate_proj", mlp + "up_proj"),
            down=self._linear(mlp + "down_proj"),
            qk_norm=self._qk_norm(attention) if self.config.qk_norm else None,
            window=self.config.windows[index] if self.config.windows else 0,
        )

    def padded(self, rows: int) -> int:
        """The number of rows to compute for ``rows`` rows."""
        return padded_rows(rows, self._smallest)

    def embed(self, ids: Tensor) -> Tensor:
        """Residual stream of the first stage, [T, hidden]."""
        if self._embedding is None:
            raise RuntimeError("only the first stage embeds token ids")
        if isinstance(self._embedding, Tensor):
            return self._embedding[ids]
        return self._embedding.rows(ids).to(self.dtype)

    def forward(
        self,
        x: Tensor,
        positions: Tensor,
        cache: KVCache,
        backend: AttentionBackend,
        plan: Any,
        prompt_len: Tensor | None = None,
    ) -> Tensor:
        """Run this stage's layers over the residual stream ``x`` [padded T, hidden], which is overwritten.

        ``prompt_len`` [padded T]: the length of the prompt of each token's sequence; only dynamic rotary positions
        need it.
        """
        config = self.config
        rows, heads, kv_heads = len(x), config.heads, config.kv_heads
        cos, sin = self._rope.rows(positions, prompt_len)
        if self._fused is not None and isinstance(backend, NativeAttention):
            return x.add_(self._fused.forward(x, cos, sin, cache, plan))
        scale = config.head_dim**-0.5
        attended = torch.zeros(rows, heads, config.head_dim, dtype=self.compute)
        # What the last block of operations adds to the residual stream.
        delta: Tensor | None = None
        for index, layer in enumerate(self._layers):
            normed = add_norm(x, delta, layer.attention_norm, config.norm_eps, self.compute)
            qkv = layer.qkv(normed).view(rows, heads + 2 * kv_heads, config.head_dim)
            if layer.qk_norm is not None:
                turned = qkv[:, : heads + kv_heads]
                turned.copy_(rms_norm(turned, layer.qk_norm, config.norm_eps, self.compute))
            backend.place(qkv, cos, sin, cache, index, plan)
            backend.attend(qkv[:, :heads], cache, index, plan, attended, scale, layer.window)
            normed = add_norm(x, layer.output(attended.view(rows, -1)), layer.mlp_norm, config.norm_eps, self.compute)
            delta = layer.down(silu_mul(layer.gate_up(normed)))
        return x if delta is None else x.add_(delta)

    def logits(self, x: Tensor, rows: Tensor) -> Tensor:
        """float32[len(rows), vocabulary] of the last stage for these rows of its residual stream."""
        if self._norm is None or self._head is None:
            raise RuntimeError("only the last stage has a head")
        selected = x.new_zeros(self.padded(len(rows)), self.config.hidden_size)
        selected[: len(rows)] = x[rows]
        normed = add_norm(selected, None, self._norm, self.config.norm_eps, self.compute)
        return self._head(normed)[: len(rows)].to(torch.float32)
