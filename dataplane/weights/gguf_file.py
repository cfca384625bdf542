"""The header of a GGUF file: metadata and the list of tensors.

Read by hand because the public reader makes an object per tokenizer entry, which takes seconds; the data are the
caller's to map. Long arrays (the tokenizer's) are skipped. Every count and length is bounded by the file's size, so
a damaged file is an error, never an allocation.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from ..models.config import ModelError

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MAX_ARRAY = 256


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """``shape`` is in rows-first order (the file has it reversed); ``offset`` counts from the file's start."""

    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    num_bytes: int


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    metadata: dict[str, Any]
    tensors: dict[str, GGUFTensor]


class _Cursor:
    """A position in the mapped file."""

    __slots__ = ("_data", "at")

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.at = 0

    def take(self, count: int) -> bytes:
        if count < 0 or self.at + count > len(self._data):
            raise ModelError("the file ends within its header")
        self.at += count
        return self._data[self.at - count : self.at]

    def number(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def string(self) -> str:
        return self.take(self.number("Q")).decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self._array()
        raise ModelError(f"metadata of unknown kind {kind}")

    def _array(self) -> Any:
        kind, count = self.number("I"), self.number("Q")
        if kind == _ARRAY:
            raise ModelError("nested metadata arrays are not supported")
        if count <= _MAX_ARRAY:
            return [self.value(kind) for _ in range(count)]
        if kind == _STRING:
            self._skip_strings(count)
        elif kind in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[kind]))
        else:
            raise ModelError(f"metadata of unknown kind {kind}")
        return None

    def _skip_strings(self, count: int) -> None:
        # A vocabulary has a hundred thousand of them, and a worker that starts is being waited for.
        at, data, size = self.at, self._data, struct.Struct("<Q").unpack_from
        try:
            for _ in range(count):
                at += 8 + size(data, at)[0]
        except (struct.error, OverflowError):
            at = len(data) + 1
        self.take(at - self.at)


def read_header(path: Path, data: mmap.mmap) -> GGUFHeader:
    """Parse and check the header of the mapped file."""
    cursor = _Cursor(data)
    try:
        return _parse(cursor, len(data))
    except ModelError as error:
        raise ModelError(f"{path} is not a usable GGUF file: {error}") from None


def _parse(cursor: _Cursor, size: int) -> GGUFHeader:
    if cursor.take(4) != b"GGUF":
        raise ModelError("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in (2, 3):
        raise ModelError(f"version {version} is not supported; supported: 2, 3")
    tensor_count, metadata_count = cursor.number("Q"), cursor.number("Q")
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.number("I"))
    entries: list[tuple[str, tuple[int, ...], int, int]] = []
    for _ in range(tensor_count):
        name, dims = cursor.string(), cursor.number("I")
        if not 1 <= dims <= 4:
            raise ModelError(f"tensor {name} has {dims} dimensions")
        shape = tuple(reversed([cursor.number("Q") for _ in range(dims)]))
        entries.append((name, shape, cursor.number("I"), cursor.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment < 1:
        raise ModelError(f"alignment {alignment} is not a positive integer")
    base = -(-cursor.at // alignment) * alignment
    tensors: dict[str, GGUFTensor] = {}
    for name, shape, type_id, offset in entries:
        try:
            kind = GGMLQuantizationType(type_id)
        except ValueError:
            raise ModelError(f"tensor {name} has the unknown type {type_id}") from None
        if name in tensors:
            raise ModelError(f"tensor {name} is listed twice")
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        elements = 1
        for extent in shape:
            elements *= extent
        if shape[-1] % per_block or elements < 1:
            raise ModelError(f"tensor {name} of shape {shape} is not whole blocks of {kind.name}")
        num_bytes = elements // per_block * block_bytes
        if base + offset + num_bytes > size:
            raise ModelError(f"tensor {name} reaches past the end of the file")
        tensors[name] = GGUFTensor(shape, kind, base + offset, num_bytes)
    return GGUFHeader(metadata, tensors)
