"""From the MODEL of a command line to an opened model."""

from pathlib import Path

from ...control.wire.location import ModelNotFound, locate_model
from ..models.config import ModelError
from .gguf import GGUFSource
from .random import parse_random
from .safetensors import SafetensorsSource
from .source import ModelSource


def open_model(model: str) -> ModelSource:
    """Open a model by path or name. ``ModelError`` says in one sentence what is wrong with it.

    ``random`` and ``random:layers=4,…`` are a small model of seeded noise, without a tokenizer.
    """
    if model == "random" or model.startswith("random:"):
        return parse_random(model)
    try:
        path = locate_model(model)
    except ModelNotFound as error:
        raise ModelError(str(error)) from None
    source: ModelSource = SafetensorsSource(path) if path.is_dir() else GGUFSource(path)
    source.name = path.name.removesuffix(".gguf") if Path(model).expanduser().exists() else model
    return source
