"""Rotary scalings: which there are, what each needs, and how a Hugging Face config names them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...control.wire.fields import MAX_TOKENS

#: Scalings that are computed; anything else is refused when the model is opened.
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
#: What a config must say of each kind, beside its name.
_NEEDED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}


class RopeError(ValueError):
    """A scaling that is unknown or incomplete, in one sentence."""


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How the rotary frequencies are changed for sequences longer than ``original_len``, the trained length.

    ``low_factor`` and ``high_factor`` belong to llama3; ``beta_fast``, ``beta_slow``, ``truncate`` and ``magnitude``
    (of the rotated vectors) to yarn. ``divisors``: what a GGUF file divides each of the frequencies by.
    """

    kind: str = "default"
    factor: float = 1.0
    original_len: int = 0
    low_factor: float = 1.0
    high_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    magnitude: float = 1.0
    divisors: tuple[float, ...] = ()

    def reach(self, max_len: int) -> int:
        """The longest sequence of a model whose description says ``max_len``.

        The description of a llama3 model counts the scaling in; others give the trained length. No sequence is
        longer than a message may say.
        """
        if self.kind not in ("default", "llama3"):
            max_len = max(max_len, int(self.original_len * self.factor))
        return min(max_len, MAX_TOKENS)


def check_kind(kind: object) -> str:
    """``kind`` if it is computed, else ``RopeError`` with the list."""
    if kind not in ROPE_KINDS:
        raise RopeError(f"rotary scaling {kind} is not supported; supported: {', '.join(ROPE_KINDS)}")
    return str(kind)


def yarn_magnitude(factor: float, strength: float = 1.0) -> float:
    """The default scale of rotated vectors under yarn."""
    return 1.0 if factor <= 1 else 0.1 * strength * math.log(factor) + 1.0


def theta_and_scaling(data: Mapping[str, Any], max_len: int) -> tuple[float, RopeScaling]:
    """From ``rope_scaling`` or ``rope_parameters`` of a config.json, with transformers' precedence.

    ``max_len``: the config's ``max_position_embeddings``. Raises ``RopeError``.
    """
    given = data.get("rope_scaling") or data.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise RopeError(f"rope_scaling is {given!r}, it must be an object")
    if any(isinstance(value, Mapping) for value in given.values()):
        raise RopeError("rotary parameters by layer type are not supported; supported: the same for all layers")
    kind = given.get("rope_type", given.get("type", "default"))
    if given.get("type", kind) != kind:
        raise RopeError(f"rope_scaling says rope_type {kind} and type {given['type']}; it must be one of the two")
    kind = check_kind(kind)
    theta = _number(given, "rope_theta", data.get("rope_theta") or 10000.0)
    if theta <= 1:
        raise RopeError(f"rope_theta is {theta:g}, it must be above 1")
    rotary = _number(given, "partial_rotary_factor", data.get("partial_rotary_factor") or 1.0)
    if rotary != 1:
        raise RopeError(f"partial_rotary_factor = {rotary:g} is not supported; supported: 1")
    if given.get("mrope_section"):
        raise RopeError("mrope_section (positions in several axes) is not supported")
    # As transformers has it, a length beside the object counts more than the one inside.
    outer = data.get("original_max_position_embeddings")
    if outer is not None:
        given = {**given, "original_max_position_embeddings": outer}
    missing = [key for key in _NEEDED[kind] if given.get(key) is None]
    if missing:
        supported = "; ".join(f"{name} ({', '.join(keys)})" if keys else name for name, keys in _NEEDED.items())
        raise RopeError(f"rotary scaling {kind} lacks {', '.join(missing)}; supported: {supported}")
    return theta, _SCALINGS[kind](given, max_len)


def _default(given: Mapping[str, Any], max_len: int) -> RopeScaling:
    return RopeScaling()


def _linear(given: Mapping[str, Any], max_len: int) -> RopeScaling:
    return RopeScaling("linear", _factor(given), max_len)


def _dynamic(given: Mapping[str, Any], max_len: int) -> RopeScaling:
    return RopeScaling("dynamic", _factor(given), max_len)


def _llama3(given: Mapping[str, Any], max_len: int) -> RopeScaling:
    low, high = _number(given, "low_freq_factor"), _number(given, "high_freq_factor")
    if not 0 < low < high:
        raise RopeError(
            f"rotary scaling llama3 needs 0 < low_freq_factor < high_freq_factor, not {low:g} and {high:g}"
        )
    return RopeScaling("llama3", _factor(given), _original(given), low, high)


def _yarn(given: Mapping[str, Any], max_len: int) -> RopeScaling:
    factor = _factor(given)
    strength, strength_all = _number(given, "mscale", 0.0), _number(given, "mscale_all_dim", 0.0)
    magnitude = yarn_magnitude(factor)
    if strength and strength_all:
        magnitude = yarn_magnitude(factor, strength) / yarn_magnitude(factor, strength_all)
    return RopeScaling(
        "yarn",
        factor,
        _original(given),
        beta_fast=_number(given, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(given, "beta_slow", 1.0) or 1.0,
        truncate=bool(given.get("truncate", True)),
        magnitude=_number(given, "attention_factor", magnitude),
    )


_SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "llama3": _llama3, "yarn": _yarn}


def _number(given: Mapping[str, Any], key: str, default: float | None = None) -> float:
    value = given.get(key)
    value = default if value is None else value
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise RopeError(f"{key} of the rotary scaling is {value!r}, it must be a number")
    return float(value)


def _factor(given: Mapping[str, Any]) -> float:
    factor = _number(given, "factor")
    if factor < 1:
        raise RopeError(f"factor of the rotary scaling is {factor:g}, it must be at least 1")
    return factor


def _original(given: Mapping[str, Any]) -> int:
    length = _number(given, "original_max_position_embeddings")
    if length < 1 or length != int(length):
        raise RopeError(f"original_max_position_embeddings is {length:g}, it must be a whole number of at least 1")
    return int(length)
