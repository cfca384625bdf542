"""What a field that a request leaves out means: the model's own advice, or the interface's default.

A Hugging Face directory may hold ``generation_config.json``, in which the model's makers say how to sample it.
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec
import structlog

from .limits import RANGES

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """By field; these are the interface's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def fields(self) -> dict[str, float]:
        return asdict(self)


def read_defaults(model: Path) -> SamplingDefaults:
    """Those of the model in the directory ``model``; values that no request could have are left out and told."""
    file = model / "generation_config.json"
    if not file.is_file():
        return SamplingDefaults()
    try:
        advice = msgspec.json.decode(file.read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.MsgspecError) as error:
        log.warning("generation_config.json cannot be read", error=type(error).__name__)
        return SamplingDefaults()
    found: dict[str, Any] = {}
    for name, usual in SamplingDefaults().fields().items():
        value = advice.get(name)
        if value is None:
            continue
        kinds = (int,) if isinstance(usual, int) else (int, float)
        if isinstance(value, kinds) and not isinstance(value, bool) and value in RANGES[name]:
            found[name] = value
        else:
            log.warning("value in generation_config.json left out", field=name, range=str(RANGES[name]))
    return SamplingDefaults(**found)
