"""Configuration from a GGUF file's metadata; what is not computed is refused by name.

The file says less than a Hugging Face config: which layers have biases and whether the head is tied is known from
the tensors that are there. Keys that are left out have the values that llama.cpp gives them.
"""

from collections.abc import Mapping
from typing import Any

from .config import EMBEDDING, HEAD, LlamaConfig, ModelError
from .rope import RopeError, RopeScaling, check_kind, yarn_magnitude

#: Architectures as GGUF names them; models of Mistral's architecture come as llama.
GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3")
#: Yarn's settings that change what is computed; at these values they do not.
_PLAIN_YARN = {
    "yarn_ext_factor": 1.0,
    "yarn_attn_factor": 1.0,
    "yarn_log_multiplier": 0.0,
    "yarn_beta_fast": 32.0,
    "yarn_beta_slow": 1.0,
}


def architecture_of(metadata: Mapping[str, Any]) -> str:
    """The file's architecture. Raises ``ModelError`` if it is not computed."""
    architecture = metadata.get("general.architecture", "(none named)")
    if architecture not in GGUF_ARCHITECTURES:
        raise ModelError(
            f"GGUF architecture {architecture} is not supported; supported: {', '.join(GGUF_ARCHITECTURES)}"
        )
    return architecture


def config_from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], divisors: tuple[float, ...] = ()
) -> LlamaConfig:
    """From the metadata and the shapes of the tensors by canonical name; ``divisors``: those of the frequencies."""
    keys = _Keys(metadata, architecture_of(metadata))
    if keys.get("expert_count", 0):
        raise ModelError("mixtures of experts are not supported; supported: dense models")
    if EMBEDDING not in shapes:
        raise ModelError("tensor token_embd.weight is missing")
    heads, hidden = keys.whole("attention.head_count"), keys.whole("embedding_length")
    head_dim = keys.whole("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if keys.whole(key, head_dim) != head_dim:
            raise ModelError(
                f"{keys.full(key)} = {keys.get(key)} is not supported; supported: {head_dim}, a whole head"
            )
    trained_len = keys.whole("context_length")
    rope = _scaling(keys, trained_len, divisors, head_dim)
    max_len, layers = rope.reach(trained_len), keys.whole("block_count")

    def has(name: str) -> bool:
        return f"model.layers.0.{name}" in shapes

    return LlamaConfig(
        vocab_size=shapes[EMBEDDING][0],
        hidden_size=hidden,
        ffn_size=keys.whole("feed_forward_length"),
        layers=layers,
        heads=heads,
        kv_heads=keys.whole("attention.head_count_kv", heads),
        head_dim=head_dim,
        norm_eps=keys.number("attention.layer_norm_rms_epsilon"),
        rope_theta=keys.number("rope.freq_base", 10000.0),
        max_len=max_len,
        tied=HEAD not in shapes,
        rope=rope,
        qkv_bias=has("self_attn.q_proj.bias"),
        output_bias=has("self_attn.o_proj.bias"),
        mlp_bias=has("mlp.gate_proj.bias"),
        qk_norm=keys.architecture == "qwen3",
        windows=_windows(keys, layers, max_len),
    )


class _Keys:
    """The metadata of one architecture."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str) -> None:
        self.architecture = architecture
        self._metadata = metadata

    def full(self, key: str) -> str:
        return f"{self.architecture}.{key}"

    def get(self, key: str, default: Any = None) -> Any:
        return self._metadata.get(self.full(key), default)

    def whole(self, key: str, default: int | None = None) -> int:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"{self.full(key)} is {value!r}, it must be one whole number")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self._present(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ModelError(f"{self.full(key)} is {value!r}, it must be a number")
        return float(value)

    def _present(self, key: str, default: Any) -> Any:
        value = self.get(key, default)
        if value is None:
            raise ModelError(f"the metadata lack {self.full(key)}")
        return value


def _scaling(keys: _Keys, trained_len: int, divisors: tuple[float, ...], head_dim: int) -> RopeScaling:
    # The old name of the factor still occurs; a factor without a kind is a linear one.
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 0.0)) or 1.0
    kind = keys.get("rope.scaling.type", "none" if factor == 1 else "linear")
    try:
        kind = check_kind("default" if kind == "none" else kind)
    except RopeError as error:
        raise ModelError(str(error)) from None
    if kind in ("dynamic", "llama3"):
        raise ModelError(f"rotary scaling {kind} is not supported in GGUF files; supported: none, linear, yarn")
    if divisors:
        if kind != "default" and factor != 1:
            raise ModelError(f"rotary scaling {kind} together with tensor rope_freqs.weight is not supported")
        if len(divisors) != head_dim // 2 or not all(divisor > 0 for divisor in divisors):
            raise ModelError(f"tensor rope_freqs.weight must hold {head_dim // 2} positive numbers")
        return RopeScaling("llama3", divisors=divisors)
    if kind == "default" or factor == 1:
        return RopeScaling()
    if factor < 1:
        raise ModelError(f"{keys.full('rope.scaling.factor')} is {factor:g}, it must be at least 1")
    original_len = keys.whole("rope.scaling.original_context_length", trained_len)
    if kind == "linear":
        return RopeScaling("linear", factor, original_len)
    for key, plain in _PLAIN_YARN.items():
        value = keys.number(f"rope.scaling.{key}", plain)
        if value != plain:
            raise ModelError(f"{keys.full(f'rope.scaling.{key}')} = {value:g} is not supported; supported: {plain:g}")
    magnitude = keys.number("rope.scaling.attn_factor", 1.0) * yarn_magnitude(factor)
    return RopeScaling("yarn", factor, original_len, magnitude=magnitude)


def _windows(keys: _Keys, layers: int, max_len: int) -> tuple[int, ...]:
    window = keys.get("attention.sliding_window", 0)
    if not window:
        return ()
    if keys.architecture != "llama":
        raise ModelError(
            f"{keys.full('attention.sliding_window')} = {window} is not supported, since the file does not say which "
            "layers have the window; supported: llama, where all have it"
        )
    window = keys.whole("attention.sliding_window")
    return () if window >= max_len else (window,) * layers
