"""What waits on a replica, and which of those that run is the last in the same order.

Under ``fcfs``, ``priority`` and ``deadline`` a sequence's place in the admission order is fixed when its request
comes (``Sequence.place``): the queue is a sorted list, and a preempted sequence returns to where it was. ``fair`` has
a queue of its own (``fair``).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from operator import attrgetter

from .sequence import Phase, Sequence

_place = attrgetter("place")
#: Entries of those that have left are not worth removing below so many.
_FEW = 64


class Running:
    """Sequences that run, by a place that is fixed while they do: a sorted list, at whose end the last is, and nearly
    always who comes.

    Who has left is dropped when it comes to the end, or when the list has grown to twice what runs.
    """

    __slots__ = ("_entries", "count")

    def __init__(self) -> None:
        self.count = 0
        self._entries: list[tuple[float, int, Sequence]] = []

    def add(self, rank: float, order: int, seq: Sequence) -> None:
        """``seq`` runs; a larger rank, or the same and a larger order, is later."""
        entries = self._entries
        if entries:
            last_rank, last_order, _ = entries[-1]
            if last_rank < rank or (last_rank == rank and last_order < order):
                entries.append((rank, order, seq))
            else:
                # It may be here already, from before it was preempted: then twice.
                insort(entries, (rank, order, seq))
        else:
            entries.append((rank, order, seq))
        self.count += 1
        if len(entries) > 2 * self.count + _FEW:
            self._entries = [entry for entry in entries if _runs(entry[2])]

    def last(self) -> Sequence:
        """The last that still runs; there must be one."""
        entries = self._entries
        while not _runs(entries[-1][2]):
            entries.pop()
        return entries[-1][2]


class WaitingQueue:
    """Waiting sequences, first in admission order first. Knows the running ones, too, for the sake of preemption."""

    def __init__(self) -> None:
        self.tokens = 0  #: known tokens of those that wait
        self.departures = 0  #: requests that came to run, or ended waiting; each counts once
        self.departed_tokens = 0  #: theirs
        self._items: list[Sequence] = []
        self._running = Running()

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
        self.note_departure(seq)
        items = self._items
        del items[0 if items[0] is seq else bisect_left(items, seq.place, key=_place)]

    def note_departure(self, seq: Sequence) -> None:
        known = len(seq.tokens) >> 2
        self.tokens -= known
        if not seq.generation:
            self.departures += 1
            self.departed_tokens += known

    def head(self) -> Sequence:
        """The next to be admitted; there must be one."""
        return self._items[0]

    def tail(self) -> Sequence:
        """The last to be admitted; there must be one."""
        return self._items[-1]

    def behind(self, most: int) -> list[Sequence]:
        """Those behind the head, in order, at most ``most``."""
        return self._items[1 : 1 + most]

    def close(self) -> None:
        """The replica is gone, and what waited here will wait elsewhere."""

    # ---- what runs -------------------------------------------------------------------------------------------

    def started(self, seq: Sequence) -> None:
        """``seq`` has been taken out and runs. Its generation is still that of the time before."""
        rank, order = seq.place
        self._running.add(rank, order, seq)

    def left(self, seq: Sequence) -> None:
        """``seq``, which ran, no longer does."""
        self._running.count -= 1

    def last(self) -> Sequence:
        """The last in order of those that run: the next to be preempted. There must be one."""
        return self._running.last()

    def outranks(self, head: Sequence) -> bool:
        """Something runs that must make way for ``head``, which waits for blocks or for a place."""
        return False

    def victims(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        """What of ``running`` must make way for ``head``, the last in order first."""
        return []


class PriorityQueue(WaitingQueue):
    """By base priority and age; a head may preempt whoever is of a less urgent base priority *and* behind it.

    Both, so that what has aged is safe: places never change, so who preempted cannot be preempted by its victim.
    """

    def __init__(self) -> None:
        super().__init__()
        self._levels: dict[int, Running] = {}  #: what runs, by base priority

    def started(self, seq: Sequence) -> None:
        level = self._levels.get(seq.priority)
        if level is None:
            level = self._levels[seq.priority] = Running()
        rank, order = seq.place
        level.add(rank, order, seq)

    def left(self, seq: Sequence) -> None:
        level = self._levels[seq.priority]
        level.count -= 1
        if not level.count:
            del self._levels[seq.priority]

    def last(self) -> Sequence:
        found: Sequence | None = None
        for level in self._levels.values():
            seq = level.last()
            if found is None or found.place < seq.place:
                found = seq
        assert found is not None
        return found

    def outranks(self, head: Sequence) -> bool:
        for priority, level in self._levels.items():
            if priority > head.priority and head.place < level.last().place:
                return True
        return False

    def victims(self, head: Sequence, running: Iterable[Sequence]) -> list[Sequence]:
        found = [seq for seq in running if seq.priority > head.priority and head.place < seq.place]
        found.sort(key=_place, reverse=True)
        return found


def _runs(seq: Sequence) -> bool:
    return seq.phase is Phase.PREFILL or seq.phase is Phase.DECODE
