"""The one event heap, and the virtual time that it moves."""

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

#: Virtual time does not begin at 0: nothing may take a time for false.
START_S = 1000.0


class Entry(list[Any]):
    """``[time, number, callback, arguments]``: compared in this order, so that equal times keep their order."""

    __slots__ = ()

    def cancel(self) -> None:
        self[2] = None


class Clock:
    """``now`` is monotonic. ``jumped`` is how far the time of day is off it."""

    def __init__(self) -> None:
        self.now = START_S
        self.jumped = 1.7e9
        self.events = 0  #: callbacks that were called
        self._heap: list[Entry] = []
        self._numbers = 0

    def read(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + self.jumped

    def at(self, when: float, callback: Callable[..., object], *args: Any) -> Entry:
        """Call ``callback`` at ``when``, or now if that is over; after all that was asked for the same time."""
        self._numbers += 1
        entry = Entry((when if when > self.now else self.now, self._numbers, callback, args))
        heappush(self._heap, entry)
        return entry

    def after(self, delay: float, callback: Callable[..., object], *args: Any) -> Entry:
        return self.at(self.now + delay, callback, *args)

    def turn(self) -> bool:
        """The next event. False if there is none."""
        heap = self._heap
        while heap:
            when, _, callback, args = heappop(heap)
            if callback is not None:
                self.now = when
                self.events += 1
                callback(*args)
                return True
        return False
