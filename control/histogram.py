"""Percentiles of the recent past at a cost that does not depend on how many values there were.

Values are counted in buckets whose bounds grow by a factor, so a percentile is off by at most half of that, whatever
its size; the window forgets by the second. Weights make a tick of 256 streams one entry.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from math import ceil, exp, floor, log

#: Each bucket is this much wider than the one before: percentiles are within 1 % of a value that was measured.
GROWTH = 1.02
#: Everything below counts as this: one microsecond.
LEAST = 1e-6
_SCALE = 1.0 / log(GROWTH)
_OFFSET = ceil(-log(LEAST) * _SCALE)


class SlidingHistogram:
    """Values (seconds) of the last ``window`` seconds, and their number since the beginning.

    ``now`` is any monotonic time in seconds; all methods forget what has left the window by then.
    """

    __slots__ = ("_current", "_past", "_second", "_sums", "count", "window")

    def __init__(self, window: int = 30) -> None:
        self.window = window
        self.count = 0  #: values ever added, by weight
        self._sums: dict[int, int] = {}  #: bucket to weight, within the window
        self._current: dict[int, int] = {}  #: the part of them of this second
        self._past: deque[tuple[int, dict[int, int]]] = deque()  #: earlier seconds of the window, oldest first
        self._second = 0

    def add(self, value: float, weight: int, now: float) -> None:
        """Count ``value`` ``weight`` times."""
        second = int(now)
        if second != self._second:
            self._advance(second)
        bucket = floor(log(value) * _SCALE) + _OFFSET if value > LEAST else 0
        sums, current = self._sums, self._current
        sums[bucket] = sums.get(bucket, 0) + weight
        current[bucket] = current.get(bucket, 0) + weight
        self.count += weight

    def percentiles(self, shares: Iterable[float], now: float) -> list[float] | None:
        """The values below which those shares (0 to 1, ascending) lie; None if the window is empty."""
        self._advance(int(now))
        total = sum(self._sums.values())
        if not total:
            return None
        found: list[float] = []
        buckets = sorted(self._sums.items())
        position, below = 0, 0
        for share in shares:
            wanted = max(1, ceil(share * total))
            while below + buckets[position][1] < wanted:
                below += buckets[position][1]
                position += 1
            # The middle of the bucket, on the scale on which it lies.
            found.append(exp((buckets[position][0] - _OFFSET + 0.5) / _SCALE))
        return found

    def _advance(self, second: int) -> None:
        if second == self._second:
            return
        if self._current:
            self._past.append((self._second, self._current))
            self._current = {}
        self._second = second
        past, sums = self._past, self._sums
        while past and past[0][0] <= second - self.window:
            for bucket, weight in past.popleft()[1].items():
                left = sums[bucket] - weight
                if left:
                    sums[bucket] = left
                else:
                    del sums[bucket]
