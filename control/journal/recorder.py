"""What the control process does for its journal: next to nothing.

A step leaves a few references behind. Now and then, what has gathered is encoded at once and handed over; everything
else (hashing, comparing, compressing, writing) is done elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from ..core.events import Event, Limits, SendPlan, Submitted
from .records import Closed, Opening, Planned, Turned, settings_of

#: In order: for an event its time, the event, and what came of it.
Item = Event | float | Opening | Planned | Turned | Closed
#: Given items in order, and whether they are to be in safety soon. It must be quick.
Hand = Callable[[list[Item], bool], None]
#: Items, or bytes of prompts among them, that are handed over together, at least.
_BATCH, _BYTES = 24, 1 << 20


class Recorder:
    """``hand`` is given what is recorded. With ``ids`` the journal will hold token ids."""

    def __init__(self, hand: Hand, ids: bool = False) -> None:
        self._hand = hand
        self._ids = ids
        self._begin()

    def _begin(self) -> None:
        self._items: list[Item] = []
        self._bytes = 0
        self._most = _BATCH  #: items after which they are handed over

    def opened(self, limits: Limits, began: float, now: float) -> None:
        """The core has been made; it is the time of day ``began``, and ``now`` on the clock of the core."""
        self._items.append(Opening("", 0, self._ids, 4, settings_of(limits), began, now))

    def took(self, event: Event, now: float) -> None:
        """The core was told of ``event``."""
        items = self._items
        if len(items) >= self._most:
            # Never between an event and what came of it.
            self._begin()
            self._hand(items, False)
            items = self._items
        items.append(now)
        items.append(event)
        if type(event) is Submitted:
            self._bytes += len(event.submit.tokens)
            if self._bytes >= _BYTES:
                self._most = 0

    def planned(self, send: SendPlan, frames: list[bytes]) -> None:
        """A plan came of the last event, and was encoded as ``frames``."""
        self._items.append(Planned(send.replica, frames, send.digest))

    def turned(self, code: str) -> None:
        """The last event, a submission, was refused."""
        self._items.append(Turned(code))

    def flush(self) -> None:
        """Hand over what there is. Not while effects of an event are being carried out."""
        items = self._items
        self._begin()
        self._hand(items, True)

    def close(self, reason: str = "") -> None:
        """The journal ends."""
        self._items.append(Closed(reason))
        self.flush()
