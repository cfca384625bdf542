"""Why a client's message is refused, in the protocol's own terms: which request, which field, what is allowed."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from .wire import Abort, ClientHello, Refused, Sampling, Status, Submit, Subscribe, WireError

_KINDS: dict[str | int | None, type[msgspec.Struct]] = {
    kind.__struct_config__.tag: kind for kind in (ClientHello, Submit, Abort, Status, Subscribe)
}
#: Where a field is itself a struct.
_INNER: dict[tuple[type[msgspec.Struct], str], type[msgspec.Struct]] = {(Submit, "sampling"): Sampling}
_PATH = re.compile(r" - at `\$((?:\[\d+\])+)`$")
#: More than any text of a decoder, less than a message may have.
_LONGEST = 1000


def refuse_frame(frame: bytes, error: WireError) -> Refused:
    """The answer to a frame that is not a message. The request is named if the frame says so much: its sender waits
    for it. ``field`` is as the message calls it, ``sampling.top_p`` for one inside another."""
    text = str(error)[:_LONGEST]
    try:
        raw: Any = msgspec.msgpack.decode(frame)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError, OverflowError, ValueError):
        return Refused(None, "protocol", "", text)
    kind = _KINDS.get(raw[0]) if isinstance(raw, list) and raw and isinstance(raw[0], int) else None
    if kind is None:
        return Refused(None, "protocol", "", text)
    key: int | None = None
    if kind is Submit and len(raw) > 1 and isinstance(raw[1], int) and 0 <= raw[1] < 1 << 64:
        key = raw[1]
    name = kind.__name__
    missing = kind.__struct_fields__[len(raw) - 1 : len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
    if missing:
        return Refused(key, "invalid", missing[0], f"{name} lacks the field {missing[0]}: {text}")
    found = _PATH.search(text)
    if found is None:
        return Refused(key, "invalid", "", f"{name}: {text}")
    path = [int(index) for index in re.findall(r"\d+", found[1])]
    field = kind.__struct_fields__[path[0] - 1]
    inner = _INNER.get((kind, field))
    if inner is not None and len(path) > 1:
        field = f"{field}.{inner.__struct_fields__[path[1]]}"
        path = path[1:]
    entry = f" at index {path[1]}" if len(path) > 1 else ""
    return Refused(key, "invalid", field, f"{field}{entry}: {text[: found.start()]}")
