"""Models in Hugging Face directories: ``config.json`` and safetensors, in one file or in indexed shards."""

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..models.config import EMBEDDING, HEAD, LlamaConfig, ModelError
from ..models.from_hf import config_from_hf
from .source import PlainSource, check_tensors

_log = logging.getLogger(__name__)

_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_PICKLED = ("*.bin", "*.pt", "*.pth", "*.pkl")
_FLOATS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16}
#: Rotary frequencies that old checkpoints hold and that follow from the configuration.
_HARMLESS = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


class SafetensorsSource(PlainSource):
    """An opened model directory; tensors are read from mapped files."""

    def __init__(self, path: Path) -> None:
        self.name = path.name
        data = _read_json(path / "config.json")
        try:
            config = config_from_hf(data)
        except ModelError as error:
            raise ModelError(f"{path / 'config.json'}: {error}") from None
        self.eos_ids = _eos_ids(path, data, config.vocab_size)
        #: The file and the name in it of each tensor.
        self._places: dict[str, tuple[Path, str]] = {}
        shapes: dict[str, tuple[int, ...]] = {}
        for file, expected in _weight_files(path).items():
            held = _shapes_in(file)
            if expected is not None and (absent := sorted(expected - set(held))):
                raise ModelError(f"{file} lacks tensor {absent[0]}, which {path / _INDEX} says it holds")
            for name, shape in held.items():
                if name in self._places:
                    raise ModelError(f"{file} holds tensor {name}, which {self._places[name][0]} holds too")
                self._places[name] = (file, name)
                shapes[name] = shape
        ignored = {name for name in shapes if _HARMLESS.fullmatch(name)}
        if config.tied and HEAD in shapes:
            if EMBEDDING not in shapes:
                self._places[EMBEDDING] = self._places[HEAD]
                shapes[EMBEDDING] = shapes[HEAD]
            ignored.add(HEAD)
        check_tensors(str(path), config, shapes, ignored)
        if HEAD in shapes and config.tied and not self._same(EMBEDDING, HEAD):
            _log.warning(
                "%s ties %s to the embedding, but the files hold other values for it: these are used", path, HEAD
            )
            config = replace(config, tied=False)
        self.config: LlamaConfig = config

    def load(self, name: str) -> Tensor:
        file, stored = self._places[name]
        with safe_open(file, framework="pt") as opened:
            return opened.get_tensor(stored)

    def bits(self, name: str) -> float:
        file, stored = self._places[name]
        with safe_open(file, framework="pt") as opened:
            return _FLOATS[opened.get_slice(stored).get_dtype()]

    def _same(self, one: str, other: str) -> bool:
        return self._places[one] == self._places[other] or torch.equal(self.load(one), self.load(other))


def _shapes_in(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a file's tensors. The library checks that the file is as long as its header says."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        with safe_open(file, framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a mapping
                view = opened.get_slice(name)
                if view.get_dtype() not in _FLOATS:
                    raise ModelError(
                        f"{file}: tensor {name} has type {view.get_dtype()}, which is not supported; "
                        f"supported: {', '.join(_FLOATS)}"
                    )
                shapes[name] = tuple(view.get_shape())
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} is not a usable safetensors file: {error}") from None
    return shapes


def _weight_files(path: Path) -> dict[Path, set[str] | None]:
    """The files of a model and, where there is an index, the tensors that it says each holds."""
    if (path / _SINGLE).is_file():
        return {path / _SINGLE: None}
    if not (path / _INDEX).is_file():
        pickled = sorted(file.name for pattern in _PICKLED for file in path.glob(pattern))
        if pickled:
            raise ModelError(
                f"{path} holds only pickled weights ({pickled[0]}), which could run code when they are read and are "
                f"never opened; supported: {_SINGLE}, or shards with {_INDEX}"
            )
        raise ModelError(f"{path} holds neither {_SINGLE} nor {_INDEX}")
    weight_map = _read_json(path / _INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ModelError(f"{path / _INDEX} lacks weight_map")
    files: dict[Path, set[str] | None] = {}
    for tensor, name in sorted(weight_map.items(), key=lambda item: str(item[1])):
        if not isinstance(name, str) or Path(name).name != name or not name.endswith(".safetensors"):
            raise ModelError(
                f"{path / _INDEX} names the file {name} for tensor {tensor}, which is not a .safetensors file in the "
                "directory"
            )
        if not (path / name).is_file():
            raise ModelError(f"{path} lacks the file {name}, in which {_INDEX} has tensor {tensor}")
        expected = files.setdefault(path / name, set())
        assert expected is not None
        expected.add(tensor)
    return files


def _eos_ids(path: Path, config: dict[str, Any], vocab_size: int) -> tuple[int, ...]:
    """Union of what the model's config and its generation config call end-of-sequence tokens."""
    generation = path / "generation_config.json"
    ids: set[int] = set()
    for data in (config, _read_json(generation) if generation.is_file() else {}):
        value = data.get("eos_token_id")
        for id in value if isinstance(value, list) else [value]:
            if isinstance(id, int) and not isinstance(id, bool) and 0 <= id < vocab_size:
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
