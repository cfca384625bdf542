"""Places of the launcher's workers that nobody has taken for long. Sans-I/O.

A worker that hangs while the control process does not know it (its connection broke, or control is new) never says
hello, and to control it looks like one that still loads. Only the launcher can tell the two apart, by how long the
process has lived; so it is asked, again and again, to end whoever should have been here by now.
"""

from __future__ import annotations

from collections.abc import Set

from .places import Layout
from .wire import KillWorker

#: A place that has been vacant for this many seconds is asked after, and again after as many.
VACANT_S = 60.0


class Vacancies:
    """Since when each vacant place is known to be."""

    def __init__(self) -> None:
        self._since: dict[tuple[int, int, int], float] = {}

    def orders(self, layout: Layout, taken: Set[tuple[int, int, int]], now: float) -> list[KillWorker]:
        """What to tell the launcher, some times a second. ``taken``: replica, stage and rank of who is there."""
        ours = (replica for replica in range(layout.replicas) if replica not in layout.external)
        places = {(replica, stage, 0) for replica in ours for stage in range(layout.stages)}
        self._since = {place: self._since.get(place, now) for place in sorted(places - taken)}
        late = [place for place, since in self._since.items() if now - since >= VACANT_S]
        for place in late:
            self._since[place] = now
        return [KillWorker(*place, 0) for place in late]
