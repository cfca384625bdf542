"""What the control process does for its journal: next to nothing.

A step leaves two references behind. Now and then, what has gathered is encoded at once and handed over; everything
else (hashing, comparing, compressing, writing) is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.events import (
    Aborted,
    Event,
    Limits,
    OwnerLost,
    ReplicaLost,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
)
from .records import (
    Answered,
    Came,
    Cancelled,
    Closed,
    Down,
    Gone,
    Opening,
    Planned,
    Rang,
    Record,
    Turned,
    Up,
    settings_of,
)

#: Records, or bytes of prompts among them, that are handed over together, at least.
_BATCH, _BYTES = 32, 1 << 20
Hand = Callable[[list[Record]], None]


class Recorder:
    """``hand`` is given records in order; it must be quick. With ``ids`` the journal will hold token ids."""

    def __init__(self, hand: Hand, ids: bool = False) -> None:
        self._hand = hand
        self._ids = ids
        self._records: list[Any] = []
        self._bytes = 0

    def opened(self, limits: Limits, began: float, now: float) -> None:
        """The core has been made; it is the time of day ``began``, and ``now`` on the clock of the core."""
        self._records.append(Opening("", 0, self._ids, 4, settings_of(limits), began, now))

    def took(self, event: Event, now: float) -> None:
        """The core was told of ``event``."""
        records = self._records
        if len(records) >= _BATCH or self._bytes >= _BYTES:
            # Never between an event and what came of it.
            self.flush()
            records = self._records
        kind = type(event)
        if kind is Returned:
            records.append(Answered(now, event.replica, event.result, event.starved_us))  # pyright: ignore
        elif isinstance(event, Submitted):
            records.append(Came(now, event.owner, event.submit))
            self._bytes += len(event.submit.tokens)
        elif isinstance(event, Aborted):
            records.append(Cancelled(now, event.owner, event.key))
        elif isinstance(event, OwnerLost):
            records.append(Gone(now, event.owner))
        elif isinstance(event, ReplicaUp):
            e = event
            records.append(Up(now, e.replica, e.epoch, e.stages, e.num_blocks, e.num_slots, e.profile))
        elif isinstance(event, ReplicaLost):
            records.append(Down(now, event.replica))
        else:
            records.append(Rang(now))

    def planned(self, send: SendPlan, frames: list[bytes]) -> None:
        """A plan came of the last event, and was encoded as ``frames``."""
        self._records.append(Planned(send.replica, frames, send.digest))

    def turned(self, code: str) -> None:
        """The last event, a submission, was refused."""
        self._records.append(Turned(code))

    def flush(self) -> None:
        """Hand over what there is. Not while effects of an event are being carried out."""
        records, self._records = self._records, []
        self._bytes = 0
        if records:
            self._hand(records)

    def close(self, reason: str = "") -> None:
        """The journal ends."""
        self._records.append(Closed(reason))
        self.flush()
