"""What a model's iterations cost depends on: the sizes in the ``config.json`` of any decoder on Hugging Face."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from .refusal import CannotSimulate


class ModelShape(Struct, frozen=True):
    """Sizes of a decoder.

    ``inner``: width of the MLP. ``gated``: whether it has a second projection up. ``parallel``: attention and MLP
    read the same input, so that a layer has one norm and one all-reduce. ``window``: most tokens that one attends to,
    0 for all. ``experts`` of which each token passes ``active``. ``value_bytes``: of a weight, and of a number in the
    KV cache.
    """

    name: str
    hidden: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    max_len: int
    gated: bool = True
    parallel: bool = False
    window: int = 0
    experts: int = 1
    active: int = 1
    tied: bool = False
    value_bytes: int = 2

    @property
    def layer_weights(self) -> int:
        """Parameters of a layer, all experts included."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return attention + self.experts * self.hidden * self.inner * (3 if self.gated else 2)

    @property
    def weight_bytes(self) -> int:
        """Of all parameters."""
        embedding = self.vocab * self.hidden * (1 if self.tied else 2)
        return self.value_bytes * (self.layers * self.layer_weights + embedding)

    @property
    def kv_token_bytes(self) -> int:
        """Of keys and values of one token in all layers."""
        return 2 * self.value_bytes * self.layers * self.kv_heads * self.head_dim


def _known(
    name: str, sizes: tuple[int, int, int, int, int, int, int], length: int, falcon: bool = False
) -> ModelShape:
    hidden, inner, layers, heads, kv_heads, head_dim, vocab = sizes
    return ModelShape(
        name, hidden, inner, layers, heads, kv_heads, head_dim, vocab, length, gated=not falcon, parallel=falcon
    )


#: The models of the paper and of the measured tables, which need no file. Mistral without its window, as the paper
#: serves it.
KNOWN = {
    shape.name: shape
    for shape in (
        _known("mistral-7b", (4096, 14336, 32, 32, 8, 128, 32000), 32768),
        _known("llama-2-7b", (4096, 11008, 32, 32, 32, 128, 32000), 4096),
        _known("llama-3-8b", (4096, 14336, 32, 32, 8, 128, 128256), 8192),
        _known("yi-34b", (7168, 20480, 60, 56, 8, 128, 64000), 200_000),
        _known("codellama-34b", (8192, 22016, 48, 64, 8, 128, 32000), 16384),
        _known("llama-2-70b", (8192, 28672, 80, 64, 8, 128, 32000), 16384),
        _known("llama-3-70b", (8192, 28672, 80, 64, 8, 128, 128256), 8192),
        _known("falcon-180b", (14848, 59392, 80, 232, 8, 64, 65024), 16384, falcon=True),
    )
}

#: Activations of MLPs without a gate, in models whose configuration does not say it otherwise.
_PLAIN = frozenset({"gelu", "gelu_new", "gelu_fast", "relu", "relu2", "gelu_pytorch_tanh"})
_UNGATED = frozenset({"falcon", "gpt2", "gpt_neox", "opt", "bloom", "phi", "gptj", "starcoder2", "mpt"})
_PARALLEL = frozenset({"falcon", "gpt_neox", "phi", "gptj", "cohere"})


def load_shape(model: str) -> ModelShape:
    """A model by name, or from the ``config.json`` of a directory or file. Raises ``CannotSimulate``."""
    if model in KNOWN:
        return KNOWN[model]
    path = Path(model).expanduser()
    if path.is_dir():
        path /= "config.json"
    if path.suffix != ".json":
        raise CannotSimulate(
            f"there is no model {model!r}: it is one of {', '.join(sorted(KNOWN))}, or a config.json"
        )
    try:
        config = json.loads(path.read_bytes())
    except OSError as error:
        raise CannotSimulate(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise CannotSimulate(f"{path} is not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CannotSimulate(f"{path} is not a model's configuration")
    return shape_of(config, path.parent.name or path.stem)


def shape_of(config: Mapping[str, object], name: str) -> ModelShape:
    """The shape that a ``config.json`` describes. Raises ``CannotSimulate``, which names the field."""
    text = config.get("text_config")
    if isinstance(text, dict):
        config = {**config, **text}

    def size(*names: str, default: int = 0) -> int:
        for field in names:
            value = config.get(field)
            if value is None:
                continue
            if type(value) is not int or not 1 <= value < 1 << 32:
                raise CannotSimulate(f"{name}: {field} must be a number from 1 on, not {value!r}")
            return value
        if not default:
            raise CannotSimulate(f"{name}: the configuration has no {names[0]}")
        return default

    kind = str(config.get("model_type", ""))
    hidden = size("hidden_size", "n_embd", "d_model")
    heads = size("num_attention_heads", "n_head", "n_heads")
    kv_heads = size("num_key_value_heads", "num_kv_heads", default=heads)
    if config.get("multi_query") is True and not config.get("new_decoder_architecture"):
        kv_heads = 1
    experts = size("num_local_experts", "n_routed_experts", "num_experts", default=1)
    act = str(config.get("hidden_act") or config.get("activation_function") or "")
    gated = kind not in _UNGATED and not (act in _PLAIN and not kind.startswith("gemma"))
    window = size("sliding_window", default=1 << 32) if config.get("use_sliding_window", True) else 1 << 32
    inner = size("intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size", default=4 * hidden)
    if experts > 1:
        inner = size("moe_intermediate_size", default=inner)
    return ModelShape(
        name=name,
        hidden=hidden,
        inner=inner,
        layers=size("num_hidden_layers", "n_layer", "n_layers"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=size("head_dim", default=max(1, hidden // heads)),
        vocab=size("vocab_size"),
        max_len=size("max_position_embeddings", "n_positions", "max_seq_len", default=2048),
        gated=gated,
        parallel=kind in _PARALLEL and config.get("parallel_attn", True) is not False,
        window=0 if window >= 1 << 32 else window,
        experts=experts,
        active=size("num_experts_per_tok", "num_experts_per_token", default=1),
        tied=bool(config.get("tie_word_embeddings", False)),
        value_bytes=4 if config.get("torch_dtype", config.get("dtype")) == "float32" else 2,
    )
