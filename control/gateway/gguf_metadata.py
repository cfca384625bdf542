"""Reads the key-value head of a GGUF file and nothing after it: no tensor is touched, no numpy needed.

The layout: magic, version, tensor count, pair count, then pairs of (string key, type, value). All integers are
little-endian; a string is a u64 length and UTF-8 bytes. 50 thousand tokens take about 50 ms.
"""

import mmap
import struct
from pathlib import Path
from typing import Any

_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9
_MAX_PAIRS = 1 << 16
_MAX_ITEMS = 1 << 24

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


class GgufError(ValueError):
    """The file is not a GGUF file that can be read. The text names the reason."""


def read_metadata(path: Path) -> dict[str, Any]:
    """All key-value pairs of the file. Raises ``GgufError``, or ``OSError`` if it cannot be opened."""
    with path.open("rb") as file:
        try:
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise GgufError(f"{path.name} is empty") from None
    with data:
        try:
            return _read_pairs(data)
        except (struct.error, UnicodeDecodeError, KeyError, MemoryError) as error:
            raise GgufError(f"{path.name} is damaged: {error!r}") from None
        except GgufError as error:
            raise GgufError(f"{path.name}: {error}") from None


def _read_pairs(data: mmap.mmap) -> dict[str, Any]:
    if data[:4] != b"GGUF":
        raise GgufError("not a GGUF file")
    version = _U32.unpack_from(data, 4)[0]
    if version not in (2, 3):
        raise GgufError(f"GGUF version {version} is not supported, only 2 and 3")
    count = _U64.unpack_from(data, 16)[0]
    if count > _MAX_PAIRS:
        raise GgufError(f"{count} key-value pairs")
    pairs: dict[str, Any] = {}
    offset = 24
    for _ in range(count):
        key, offset = _read_string(data, offset)
        kind = _U32.unpack_from(data, offset)[0]
        pairs[key], offset = _read_value(data, offset + 4, kind)
    return pairs


def _read_string(data: mmap.mmap, offset: int) -> tuple[str, int]:
    length = _U64.unpack_from(data, offset)[0]
    end = offset + 8 + length
    if end > len(data):
        raise GgufError("a string reaches past the end")
    return data[offset + 8 : end].decode(), end


def _read_value(data: mmap.mmap, offset: int, kind: int) -> tuple[Any, int]:
    if kind == _STRING:
        return _read_string(data, offset)
    if kind != _ARRAY:
        scalar = struct.Struct(_SCALARS[kind])
        return scalar.unpack_from(data, offset)[0], offset + scalar.size
    item = _U32.unpack_from(data, offset)[0]
    length = _U64.unpack_from(data, offset + 4)[0]
    offset += 12
    if length > _MAX_ITEMS:
        raise GgufError(f"an array of {length} items")
    if item == _STRING:
        strings: list[str] = []
        for _ in range(length):
            text, offset = _read_string(data, offset)
            strings.append(text)
        return strings, offset
    if item == _ARRAY:
        raise GgufError("nested arrays are not supported")
    packed = struct.Struct(f"<{length}{_SCALARS[item][1]}")
    return list(packed.unpack_from(data, offset)), offset + packed.size
