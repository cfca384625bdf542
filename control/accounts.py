"""What is added up over the life of the control process."""

from __future__ import annotations

from dataclasses import dataclass

from .wire import Result


@dataclass(slots=True)
class StageAccount:
    """Where a stage's time went, in microseconds, over the life of the control process.

    ``late`` counts iterations whose plan had not come when the one before ended, ``late_us`` the time waited for it.
    Idle time is counted only while plans are out: an empty server is not idle.
    """

    iterations: int = 0
    late: int = 0
    busy_us: int = 0
    idle_us: int = 0
    late_us: int = 0

    def add(self, result: Result, after_pause: bool) -> None:
        self.iterations += 1
        # Whatever a worker says of its clock, a counter only grows.
        self.busy_us += max(0, result.ended_us - result.started_us)
        if after_pause:
            return
        self.idle_us += result.idle_us
        if result.starved_us:
            self.late += 1
            self.late_us += result.starved_us
