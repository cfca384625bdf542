"""Models in GGUF files: names and rotary order of Hugging Face, in float32, or in 4 bits as they are held."""

import math
import mmap
import re
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.quantised import Int4Weight
from ..models.config import EMBEDDING, FINAL_NORM, HEAD, ModelError
from ..models.from_gguf import architecture_of, config_from_gguf
from .dequantise import FOUR_BITS, SUPPORTED_TYPES, four_bits, widen
from .gguf_file import GGUFTensor, read_header
from .source import check_tensors

_TOP = {"token_embd.weight": EMBEDDING, "output_norm.weight": FINAL_NORM, "output.weight": HEAD}
_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_NAME = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
#: What each rotary frequency is divided by: part of the configuration, not of a layer.
_DIVISORS = "rope_freqs.weight"
#: Rotary frequencies that old files hold and that follow from the metadata.
_HARMLESS = re.compile(r"blk\.\d+\.attn_rot_embd\.weight")

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
        self.name = path.stem
        try:
            # The architecture first: of another one, neither names nor types mean anything.
            if (parts := header.metadata.get("split.count", 1)) not in (0, 1):
                raise ModelError(f"files in {parts} parts are not supported; join them with llama-gguf-split --merge")
            self._pairs_neighbours = architecture_of(header.metadata) == "llama"
            self._tensors = _by_canonical_name(header.tensors)
            shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
            divisors = header.tensors.get(_DIVISORS)
            values = () if divisors is None else tuple(self._read(divisors).flatten().tolist())
            self.config = config_from_gguf(header.metadata, shapes, values)
        except ModelError as error:
            raise ModelError(f"{path}: {error}") from None
        check_tensors(str(path), self.config, shapes)
        ids = {header.metadata.get("tokenizer.ggml." + key) for key in _EOS_KEYS}
        vocabulary = self.config.vocab_size
        self.eos_ids = tuple(sorted(id for id in ids if isinstance(id, int) and 0 <= id < vocabulary))

    def _raw(self, tensor: GGUFTensor) -> NDArray[np.uint8]:
        return np.frombuffer(self._data, np.uint8, tensor.num_bytes, tensor.offset)

    def _read(self, tensor: GGUFTensor) -> Tensor:
        return widen(self._raw(tensor), tensor.type, tensor.shape)

    def load(self, name: str) -> Tensor:
        return self._in_order(name, self._read(self._tensors[name]))

    def bits(self, name: str) -> float:
        tensor = self._tensors[name]
        return tensor.num_bytes * 8 / math.prod(tensor.shape)

    def has_int4(self, name: str) -> bool:
        return self._tensors[name].type in FOUR_BITS and len(self._tensors[name].shape) == 2

    def load_int4(self, name: str) -> Int4Weight:
        tensor = self._tensors[name]
        weight = four_bits(self._raw(tensor), tensor.type, tensor.shape)
        if not bool(weight.scales.isfinite().all() and weight.minima.isfinite().all()):
            raise ModelError(f"tensor {name} of {self.name} holds values that are not finite in 4 bits")
        parts = (self._in_order(name, part) for part in (weight.values, weight.scales, weight.minima))
        return Int4Weight(*parts)

    def _in_order(self, name: str, values: Tensor) -> Tensor:
        """Rows of queries and keys in the order that rotation here expects."""
        if not self._pairs_neighbours:
            return values
        if ".q_proj." in name:
            return _rotary_halves(values, self.config.heads)
        if ".k_proj." in name:
            return _rotary_halves(values, self.config.kv_heads)
        return values


def _rotary_halves(values: Tensor, heads: int) -> Tensor:
    """Undo the file's order of a head's rows, which pairs neighbours: first halves and second halves again."""
    pairs = values.view(heads, -1, 2, *values.shape[1:])
    return pairs.transpose(1, 2).reshape(values.shape)


def _by_canonical_name(tensors: dict[str, GGUFTensor]) -> dict[str, GGUFTensor]:
    """Every tensor of the file that belongs to a layer; types and names that are not known are refused."""
    found: dict[str, GGUFTensor] = {}
    for name, tensor in tensors.items():
        if _HARMLESS.fullmatch(name):
            continue
        if tensor.type not in SUPPORTED_TYPES:
            supported = ", ".join(kind.name for kind in SUPPORTED_TYPES)
            raise ModelError(
                f"tensor {name} has type {tensor.type.name}, which is not supported; supported: {supported}"
            )
        if name != _DIVISORS:
            canonical = _canonical(name)
            if canonical in found:
                raise ModelError(f"tensor {name} is there under another name too")
            found[canonical] = tensor
    return found


def _canonical(name: str) -> str:
    if name in _TOP:
        return _TOP[name]
    match = _LAYER_NAME.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    raise ModelError(f"the file holds tensor {name}, which the model has no place for")
