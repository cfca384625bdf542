"""Requests that end by time: at their deadline, or because they waited too long for their first chunk."""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf

from .sequence import Phase, Sequence

#: Entries of requests that have ended are not worth removing below so many.
_FEW = 1024

Entry = tuple[float, int, str, Sequence]


class Expiry:
    """A heap of times. What no longer counts is dropped when it comes to the top, or when too much has gathered."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []
        self._most = _FEW

    def watch(self, seq: Sequence, at: float, reason: str) -> None:
        """End ``seq`` at ``at`` with ``reason``: ``deadline``, or ``queue_timeout`` if it has not run by then."""
        heap = self._heap
        heappush(heap, (at, seq.order, reason, seq))
        if len(heap) > self._most:
            self._heap = [entry for entry in heap if _counts(entry)]
            heapify(self._heap)
            self._most = 2 * len(self._heap) + _FEW

    def next(self) -> float:
        """When the next request ends by time."""
        heap = self._heap
        while heap and not _counts(heap[0]):
            heappop(heap)
        return heap[0][0] if heap else inf

    def due(self, now: float) -> list[tuple[Sequence, str]]:
        """Take out what ends by ``now``, with its reason."""
        found: list[tuple[Sequence, str]] = []
        while self.next() <= now:
            _, _, reason, seq = heappop(self._heap)
            if all(seq is not other for other, _ in found):
                found.append((seq, reason))
        return found


def _counts(entry: Entry) -> bool:
    seq = entry[3]
    return seq.phase is not Phase.DONE and (entry[2] == "deadline" or not seq.generation)
