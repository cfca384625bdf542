"""What the control process does for its journal: next to nothing.

What a step leaves is encoded before its objects are gone, into memory that is at hand, and copied out now and then;
everything else (hashing, comparing, compressing, writing) is done elsewhere. Were the objects kept, to be encoded
many together, the steps after it would be given other memory than the one that has just come free.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from msgspec import msgpack

from ..core.events import Event, Limits, SendPlan
from .records import Closed, Opening, Planned, Turned, settings_of

#: In order: for an event its time, the event, and what came of it.
Item = Event | float | Opening | Planned | Turned | Closed
#: Given items in order, encoded, nothing if there are none, and whether they are to be in safety soon. It must be
#: quick, and keep none of the memory.
Hand = Callable[[bytes | bytearray, bool], None]
#: Bytes that are handed over together, at least, unless they are wanted soon.
_BATCH = 32 << 10
#: The beginning of a MessagePack array of any length: how many items are in it follows when that is known.
_HEAD = struct.Struct(">BI")
_ARRAY_32 = 0xDD

_encode_into = msgpack.Encoder().encode_into
#: The items that were handed over. Raises ``msgspec.MsgspecError``.
decode_items = msgpack.Decoder(list[Item]).decode


class Recorder:
    """``hand`` is given what is recorded. With ``ids`` the journal will hold token ids."""

    def __init__(self, hand: Hand, ids: bool = False) -> None:
        self._hand = hand
        self._ids = ids
        self._data = bytearray(_HEAD.size)
        self._count = 0  #: of items in it

    def opened(self, limits: Limits, began: float, now: float) -> None:
        """The core has been made; it is the time of day ``began``, and ``now`` on the clock of the core."""
        self._add(Opening("", 0, self._ids, 4, settings_of(limits), began, now))

    def took(self, event: Event, now: float) -> None:
        """The core was told of ``event``."""
        if len(self._data) >= _BATCH:
            # Never between an event and what came of it.
            self._give(False)
        data = self._data
        _encode_into(now, data, -1)
        _encode_into(event, data, -1)
        self._count += 2

    def planned(self, send: SendPlan, frames: list[bytes]) -> None:
        """A plan came of the last event, and was encoded as ``frames``."""
        self._add(Planned(send.replica, frames, send.digest))

    def turned(self, code: str) -> None:
        """The last event, a submission, was refused."""
        self._add(Turned(code))

    def flush(self) -> None:
        """Hand over what there is. Not while effects of an event are being carried out."""
        self._give(True)

    def close(self, reason: str = "") -> None:
        """The journal ends."""
        self._add(Closed(reason))
        self.flush()

    def _add(self, item: Item) -> None:
        _encode_into(item, self._data, -1)
        self._count += 1

    def _give(self, soon: bool) -> None:
        data = self._data
        if not self._count:
            self._hand(b"", soon)
            return
        _HEAD.pack_into(data, 0, _ARRAY_32, self._count)
        self._count = 0
        self._hand(data, soon)
        if len(data) > 4 * _BATCH:
            self._data = bytearray(_HEAD.size)  # as large a one is not kept
        else:
            del data[_HEAD.size :]
