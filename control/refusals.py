"""Why a client's message is refused, in the protocol's own terms: which request, which field, what is allowed."""

from __future__ import annotations

import re

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
    for it. ``field`` is as the message calls it, ``sampling.top_p`` for one inside another.

    Only the frame's first few bytes are looked at, whatever the rest is.
    """
    text = str(error)[:_LONGEST]
    count, at = _entries(frame)
    tag, at = _integer(frame, at) if count else (None, at)
    kind = _KINDS.get(tag)
    if kind is None:
        return Refused(None, "protocol", "", text)
    key = _integer(frame, at)[0] if kind is Submit and count > 1 else None
    name = kind.__name__
    missing = kind.__struct_fields__[count - 1 : len(kind.__struct_fields__) - len(kind.__struct_defaults__)]
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


def _entries(frame: bytes) -> tuple[int, int]:
    """How many entries the array that the frame begins with says it has (0: it begins with none), and where they
    begin."""
    first = frame[0] if frame else 0
    if first >> 4 == 9:
        return first & 15, 1
    width = {0xDC: 2, 0xDD: 4}.get(first, 0)
    return int.from_bytes(frame[1 : 1 + width], "big"), 1 + width


def _integer(frame: bytes, at: int) -> tuple[int | None, int]:
    """The integer from 0 on at a place of the frame, None if another thing is there, and where it ends."""
    first = frame[at] if at < len(frame) else 0xC0
    if first < 0x80:
        return first, at + 1
    end = at + 1 + {0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8}.get(first, 0)
    if end == at + 1 or end > len(frame):
        return None, end
    return int.from_bytes(frame[at + 1 : end], "big"), end
