"""What a Llama-family model is made of, from either of its two descriptions (GGUF metadata, Hugging Face config)."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any


class ModelError(ValueError):
    """A model that cannot be served, in one sentence for whoever started the server."""


#: Rotary scalings that are computed; anything else is refused when the model is opened.
ROPE_KINDS = ("default",)
_HF_ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Shape of a decoder with RMSNorm, rotary positions, grouped-query attention and a gated MLP, without biases."""

    vocab_size: int
    hidden_size: int
    ffn_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    rope_theta: float
    max_len: int
    tied: bool

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "ffn_size", "layers", "heads", "kv_heads", "head_dim", "max_len"):
            if getattr(self, field) < 1:
                raise ModelError(f"the model's {field} is {getattr(self, field)}, it must be at least 1")
        if self.heads % self.kv_heads:
            raise ModelError(f"{self.heads} attention heads cannot share {self.kv_heads} KV heads evenly")
        if self.head_dim % 2:
            raise ModelError(f"a head of {self.head_dim} dimensions has no rotary halves")


EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"


def tensor_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Canonical (Hugging Face) name and shape of every tensor of the model."""
    hidden, q_size, kv_size = config.hidden_size, config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (config.vocab_size, hidden), FINAL_NORM: (hidden,)}
    if not config.tied:
        shapes[HEAD] = (config.vocab_size, hidden)
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = (hidden,)
        shapes[prefix + "post_attention_layernorm.weight"] = (hidden,)
        shapes[prefix + "self_attn.q_proj.weight"] = (q_size, hidden)
        shapes[prefix + "self_attn.k_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.v_proj.weight"] = (kv_size, hidden)
        shapes[prefix + "self_attn.o_proj.weight"] = (hidden, q_size)
        shapes[prefix + "mlp.gate_proj.weight"] = (config.ffn_size, hidden)
        shapes[prefix + "mlp.up_proj.weight"] = (config.ffn_size, hidden)
        shapes[prefix + "mlp.down_proj.weight"] = (hidden, config.ffn_size)
    return shapes


def config_from_hf(data: Mapping[str, Any]) -> LlamaConfig:
    """From ``config.json``; refuses by name what is not computed."""
    architectures = data.get("architectures") or ["(none named)"]
    if architectures[0] not in _HF_ARCHITECTURES:
        raise ModelError(
            f"architecture {architectures[0]} is not supported; supported: {', '.join(_HF_ARCHITECTURES)}"
        )
    rope = {**(data.get("rope_scaling") or {}), **(data.get("rope_parameters") or {})}
    _check_rope(str(rope.get("rope_type", rope.get("type", "default"))))
    for key, plain in (("hidden_act", "silu"), ("attention_bias", False), ("mlp_bias", False)):
        if data.get(key, plain) != plain:
            raise ModelError(f"{key} = {data[key]!r} is not supported; supported: {plain!r}")
    if data.get("sliding_window"):
        raise ModelError(f"sliding_window = {data['sliding_window']} is not supported; supported: none")
    if data.get("quantization_config"):
        method = data["quantization_config"].get("quant_method", "unnamed")
        raise ModelError(f"quantised checkpoints ({method}) are not supported; supported: plain safetensors")
    try:
        heads = int(data["num_attention_heads"])
        hidden = int(data["hidden_size"])
        return LlamaConfig(
            vocab_size=int(data["vocab_size"]),
            hidden_size=hidden,
            ffn_size=int(data["intermediate_size"]),
            layers=int(data["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(data.get("num_key_value_heads") or heads),
            head_dim=int(data.get("head_dim") or hidden // heads),
            norm_eps=float(data.get("rms_norm_eps", 1e-6)),
            rope_theta=float(data.get("rope_theta") or rope.get("rope_theta") or 10000.0),
            max_len=int(data.get("max_position_embeddings", 2048)),
            tied=bool(data.get("tie_word_embeddings", False)),
        )
    except KeyError as missing:
        raise ModelError(f"config.json lacks {missing}") from None


def config_from_gguf(data: Mapping[str, Any], vocab_rows: int, tied: bool) -> LlamaConfig:
    """From a GGUF file's metadata; the vocabulary's size is the embedding's, the head is tied if it is absent."""
    architecture = data.get("general.architecture", "(none named)")
    if architecture != "llama":
        raise ModelError(f"GGUF architecture {architecture} is not supported; supported: llama")
    _check_rope(str(data.get("llama.rope.scaling.type", "none")).replace("none", "default"))
    if data.get("llama.expert_count", 0):
        raise ModelError("mixtures of experts are not supported; supported: dense llama")
    try:
        heads = int(data["llama.attention.head_count"])
        hidden = int(data["llama.embedding_length"])
        head_dim = int(data.get("llama.attention.key_length", hidden // heads))
        config = LlamaConfig(
            vocab_size=vocab_rows,
            hidden_size=hidden,
            ffn_size=int(data["llama.feed_forward_length"]),
            layers=int(data["llama.block_count"]),
            heads=heads,
            kv_heads=int(data.get("llama.attention.head_count_kv", heads)),
            head_dim=head_dim,
            norm_eps=float(data["llama.attention.layer_norm_rms_epsilon"]),
            rope_theta=float(data.get("llama.rope.freq_base", 10000.0)),
            max_len=int(data["llama.context_length"]),
            tied=tied,
        )
    except KeyError as missing:
        raise ModelError(f"the GGUF metadata lack {missing}") from None
    rotary = int(data.get("llama.rope.dimension_count", head_dim))
    if rotary != head_dim:
        raise ModelError(f"rotary positions over {rotary} of {head_dim} dimensions are not supported")
    return config


def _check_rope(kind: str) -> None:
    if kind not in ROPE_KINDS:
        raise ModelError(f"rotary scaling {kind} is not supported; supported: {', '.join(ROPE_KINDS)}")


def split_layers(layers: int, stages: int) -> list[range]:
    """The layers of each stage, as even as possible; where they differ, earlier stages have one more."""
    if not 1 <= stages <= layers:
        raise ModelError(f"{layers} layers cannot be split over {stages} stages")
    share, rest = divmod(layers, stages)
    bounds = [stage * share + min(stage, rest) for stage in range(stages + 1)]
    return [range(begin, end) for begin, end in pairwise(bounds)]
