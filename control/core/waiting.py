"""What waits on a replica, and which of those that run is the last in the same order.

A sequence's place in the admission order is fixed when its request comes (``Sequence.place``): so the queue is a
sorted list, and a preempted sequence returns to where it was. Of those that run a heap knows the last; who has left
is dropped from it when it comes to the top, or when the heap has grown to twice what runs.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from operator import attrgetter

from .sequence import Phase, Sequence

_place = attrgetter("place")
#: Entries of those that have left are not worth removing below so many.
_FEW = 64


class WaitingQueue:
    """Waiting sequences, first in admission order first. Knows the running ones, too, for the sake of preemption."""

    __slots__ = ("_count", "_items", "_last", "tokens")

    def __init__(self) -> None:
        self.tokens = 0  #: known tokens of those that wait
        self._items: list[Sequence] = []
        self._last: list[tuple[float, int, Sequence]] = []  #: running, by descending place
        self._count = 0  #: running

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._items)

    def __contains__(self, seq: object) -> bool:
        return seq in self._items

    def push(self, seq: Sequence) -> None:
        """Put ``seq`` at its place."""
        self.tokens += len(seq.tokens) >> 2
        items = self._items
        if not items or items[-1].place < seq.place:
            items.append(seq)
        else:
            insort(items, seq, key=_place)

    def remove(self, seq: Sequence) -> None:
        """Take out ``seq``, which must be here."""
        self.tokens -= len(seq.tokens) >> 2
        items = self._items
        del items[0 if items[0] is seq else bisect_left(items, seq.place, key=_place)]

    def head(self) -> Sequence:
        """The next to be admitted; there must be one."""
        return self._items[0]

    def tail(self) -> Sequence:
        """The last to be admitted; there must be one."""
        return self._items[-1]

    def behind(self, most: int) -> list[Sequence]:
        """Those behind the head, in order, at most ``most``."""
        return self._items[1 : 1 + most]

    # ---- what runs -------------------------------------------------------------------------------------------

    def started(self, seq: Sequence) -> None:
        """``seq`` has been admitted."""
        rank, order = seq.place
        last = self._last
        heappush(last, (-rank, -order, seq))
        self._count += 1
        if len(last) > 2 * self._count + _FEW:
            self._last = [entry for entry in last if _runs(entry[2])]
            heapify(self._last)

    def left(self, seq: Sequence) -> None:
        """``seq``, which was admitted, no longer runs."""
        self._count -= 1

    def last(self) -> Sequence:
        """The last in order of those that run: the next to be preempted. There must be one."""
        last = self._last
        while not _runs(last[0][2]):
            heappop(last)
        return last[0][2]


def _runs(seq: Sequence) -> bool:
    return seq.phase is Phase.PREFILL or seq.phase is Phase.DECODE
