"""Configuration from a Hugging Face ``config.json``; what is not computed is refused by name.

Keys that a file leaves out have the values that the transformers library gives them, which differ by architecture.
"""

from collections.abc import Mapping
from typing import Any

from .config import LlamaConfig, ModelError
from .rope import RopeError, theta_and_scaling

#: What transformers assumes for absent keys. None: derived from other keys.
_DEFAULTS: dict[str, dict[str, int | None]] = {
    "LlamaForCausalLM": {"num_key_value_heads": None, "max_position_embeddings": 2048, "head_dim": None},
    "MistralForCausalLM": {
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "head_dim": None,
        "sliding_window": 4096,
    },
    "Qwen2ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "head_dim": None,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
    "Qwen3ForCausalLM": {
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "head_dim": 128,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
}
_LAYER_TYPES = ("full_attention", "sliding_attention")


def config_from_hf(data: Mapping[str, Any]) -> LlamaConfig:
    """From ``config.json``. Raises ``ModelError``."""
    architectures = data.get("architectures")
    architecture = architectures[0] if isinstance(architectures, list) and architectures else "(none named)"
    if architecture not in _DEFAULTS:
        raise ModelError(f"architecture {architecture} is not supported; supported: {', '.join(_DEFAULTS)}")
    data = {**_DEFAULTS[architecture], **data}
    if data.get("hidden_act", "silu") != "silu":
        raise ModelError(f"hidden_act = {data['hidden_act']!r} is not supported; supported: 'silu'")
    quantised = data.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unnamed") if isinstance(quantised, Mapping) else "unnamed"
        raise ModelError(f"quantised checkpoints ({method}) are not supported; supported: plain safetensors")
    heads, hidden = _int(data, "num_attention_heads"), _int(data, "hidden_size")
    layers, trained_len = _int(data, "num_hidden_layers"), _int(data, "max_position_embeddings")
    try:
        theta, rope = theta_and_scaling(data, trained_len)
    except RopeError as error:
        raise ModelError(str(error)) from None
    max_len = rope.reach(trained_len)
    has_bias = architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM") and _bool(data, "attention_bias")
    return LlamaConfig(
        vocab_size=_int(data, "vocab_size"),
        hidden_size=hidden,
        ffn_size=_int(data, "intermediate_size"),
        layers=layers,
        heads=heads,
        kv_heads=_int(data, "num_key_value_heads", heads),
        head_dim=_int(data, "head_dim", hidden // heads),
        norm_eps=_float(data, "rms_norm_eps", 1e-6),
        rope_theta=theta,
        max_len=max_len,
        tied=_bool(data, "tie_word_embeddings"),
        rope=rope,
        qkv_bias=has_bias or architecture == "Qwen2ForCausalLM",
        output_bias=has_bias,
        mlp_bias=architecture == "LlamaForCausalLM" and _bool(data, "mlp_bias"),
        qk_norm=architecture == "Qwen3ForCausalLM",
        windows=_windows(architecture, data, layers, max_len),
    )


def _windows(architecture: str, data: Mapping[str, Any], layers: int, max_len: int) -> tuple[int, ...]:
    window = data.get("sliding_window")
    if architecture == "LlamaForCausalLM":
        if window:
            raise ModelError(f"sliding_window = {window} is not supported for {architecture}, which has no window")
        return ()
    sliding = [True] * layers
    if architecture != "MistralForCausalLM":
        sliding = _sliding_layers(data, layers)
    if window is None or not any(sliding):
        return ()
    window = _int(data, "sliding_window")
    # A window that no sequence leaves hides nothing.
    return () if window >= max_len else tuple(window if each else 0 for each in sliding)


def _sliding_layers(data: Mapping[str, Any], layers: int) -> list[bool]:
    """Which layers of a Qwen model have the window."""
    used = _bool(data, "use_sliding_window") and data.get("sliding_window") is not None
    kinds = data.get("layer_types")
    if kinds is None:
        first = _int(data, "max_window_layers", least=0)
        return [used and layer >= first for layer in range(layers)]
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in _LAYER_TYPES for kind in kinds):
        raise ModelError(f"layer_types must name one of {', '.join(_LAYER_TYPES)} for each of the {layers} layers")
    if not used and "sliding_attention" in kinds:
        raise ModelError("layer_types names sliding_attention, but use_sliding_window or sliding_window is not set")
    return [kind == "sliding_attention" for kind in kinds]


def _int(data: Mapping[str, Any], key: str, default: int | None = None, least: int = 1) -> int:
    value = data.get(key)
    value = default if value is None else value
    if value is None:
        raise ModelError(f"{key} is missing")
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ModelError(f"{key} is {value!r}, it must be a whole number of at least {least}")
    return value


def _float(data: Mapping[str, Any], key: str, default: float) -> float:
    value = data.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ModelError(f"{key} is {value!r}, it must be a number above 0")
    return float(value)


def _bool(data: Mapping[str, Any], key: str) -> bool:
    value = data.get(key, False)
    if value is not None and not isinstance(value, bool):
        raise ModelError(f"{key} is {value!r}, it must be true or false")
    return bool(value)
