"""What the host of a virtual machine takes of its processors: figures of such a moment tell nothing of a program."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import psutil

#: A window is undisturbed if the host took no more of it.
QUIET = 0.03


class Stolen:
    """The host's part of the machine's time since this was made."""

    def __init__(self) -> None:
        self._before = psutil.cpu_times()

    def share(self) -> float:
        """Of all processors; 0 where the system does not tell."""
        now = psutil.cpu_times()
        whole = sum(now) - sum(self._before)
        return (getattr(now, "steal", 0.0) - getattr(self._before, "steal", 0.0)) / max(whole, 1e-9)


def undisturbed(found: Sequence[tuple[float, float]]) -> float:
    """The median of the values (of value, stolen share) of undisturbed windows, or of all if none was."""
    return statistics.median([value for value, stolen in found if stolen <= QUIET] or [value for value, _ in found])
