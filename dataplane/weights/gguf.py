"""Models in GGUF files: names and rotary order of Hugging Face, values dequantised to float32."""

import mmap
import re
from pathlib import Path

import numpy as np
from torch import Tensor

from ..models.config import EMBEDDING, FINAL_NORM, HEAD, ModelError, config_from_gguf
from .dequantise import SUPPORTED_TYPES, widen
from .gguf_file import read_header
from .source import check_tensors

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.weight")

_EOS_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


class GGUFSource:
    """An opened GGUF file, mapped into memory."""

    def __init__(self, path: Path) -> None:
        with path.open("rb") as file:
            try:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except ValueError:
                raise ModelError(f"{path} is not a usable GGUF file: it is empty") from None
        header = read_header(path, self._data)
        self._path = path
        self._tensors = {_canonical(path, name): tensor for name, tensor in header.tensors.items()}
        for name, tensor in header.tensors.items():
            if tensor.type not in SUPPORTED_TYPES:
                supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
                raise ModelError(
                    f"{path}: tensor {name} has type {tensor.type.name}, which is not supported; "
                    f"supported: {supported}"
                )
        if EMBEDDING not in self._tensors:
            raise ModelError(f"{path} lacks tensor token_embd.weight")
        vocabulary = self._tensors[EMBEDDING].shape[0]
        self.config = config_from_gguf(header.metadata, vocabulary, tied=HEAD not in self._tensors)
        check_tensors(str(path), self.config, {name: tensor.shape for name, tensor in self._tensors.items()})
        ids = {header.metadata.get("tokenizer.ggml." + key) for key in _EOS_KEYS}
        self.eos_ids = tuple(sorted(id for id in ids if isinstance(id, int) and 0 <= id < vocabulary))
        self.name = path.stem

    def load(self, name: str) -> Tensor:
        tensor = self._tensors[name]
        raw = np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)
        values = widen(raw, tensor.type, tensor.shape)
        if name.endswith("q_proj.weight"):
            return _rotary_halves(values, self.config.heads)
        if name.endswith("k_proj.weight"):
            return _rotary_halves(values, self.config.kv_heads)
        return values


def _rotary_halves(values: Tensor, heads: int) -> Tensor:
    """Undo the file's order of a head's rows, which pairs neighbours: first halves and second halves again."""
    pairs = values.view(heads, -1, 2, values.shape[-1])
    return pairs.transpose(1, 2).reshape(values.shape)


def _canonical(path: Path, name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.weight"
    if name == "rope_freqs.weight":
        raise ModelError(
            f"{path}: rotary scaling llama3 (tensor rope_freqs.weight) is not supported; supported: default"
        )
    raise ModelError(f"{path} holds tensor {name}, which the model has no place for")
