"""Models in Hugging Face directories: ``config.json`` and safetensors, in one file or in indexed shards."""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..models.config import HEAD, LlamaConfig, ModelError, config_from_hf
from .source import check_tensors

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_FLOATS = ("F64", "F32", "F16", "BF16")


class SafetensorsSource:
    """An opened model directory; tensors are read from mapped files."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        data = _read_json(path / "config.json")
        self.config: LlamaConfig = config_from_hf(data)
        self.eos_ids = _eos_ids(path, data, self.config.vocab_size)
        self._files: dict[str, Path] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file in _weight_files(path):
            try:
                with safe_open(file, framework="pt") as opened:
                    for name in opened.keys():  # noqa: SIM118 - not a mapping
                        view = opened.get_slice(name)
                        if view.get_dtype() not in _FLOATS:
                            raise ModelError(
                                f"{file}: tensor {name} has type {view.get_dtype()}, which is not supported; "
                                f"supported: {', '.join(_FLOATS)}"
                            )
                        if name in self._files:
                            raise ModelError(f"{file} holds tensor {name}, which {self._files[name]} holds too")
                        self._files[name] = file
                        shapes[name] = tuple(view.get_shape())
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file} is not a usable safetensors file: {error}") from None
        # Old checkpoints carry the rotary frequencies, tied ones may carry a copy of the embedding.
        ignored = {name for name in shapes if name.endswith(".rotary_emb.inv_freq")}
        if self.config.tied:
            ignored.add(HEAD)
        check_tensors(str(path), self.config, shapes, ignored)

    def load(self, name: str) -> Tensor:
        with safe_open(self._files[name], framework="pt") as opened:
            return opened.get_tensor(name)


def _weight_files(path: Path) -> list[Path]:
    if not (path / _INDEX).is_file():
        if not (path / _SINGLE).is_file():
            raise ModelError(f"{path} holds neither {_SINGLE} nor {_INDEX}")
        return [path / _SINGLE]
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ModelError(f"{path / _INDEX} lacks weight_map")
    files: list[Path] = []
    for name in sorted({str(file) for file in weight_map.values()}):
        if Path(name).name != name:
            raise ModelError(f"{path / _INDEX} names the file {name}, which is not in the directory")
        if not (path / name).is_file():
            raise ModelError(f"{path} lacks the file {name} that its index names")
        files.append(path / name)
    return files


def _eos_ids(path: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Union of what the model's config and its generation config call end-of-sequence tokens."""
    generation = path / "generation_config.json"
    ids: set[int] = set()
    for data in (config, _read_json(generation) if generation.is_file() else {}):
        value = data.get("eos_token_id")
        for id in value if isinstance(value, list) else [value]:
            if isinstance(id, int) and 0 <= id < vocab_size:
                ids.add(id)
    return tuple(sorted(ids))


def _read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"there is no {path}") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}") from None
    if not isinstance(data, dict):
        raise ModelError(f"{path} is not a JSON object")
    return data
