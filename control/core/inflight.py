"""What a replica remembers of a plan until its result comes."""

from __future__ import annotations

from collections.abc import Iterable

from .budget import Timed
from .lane import Lane
from .packing import bits
from .sequence import Sequence
from .timing import Features


class InFlight:
    """A plan that was sent and whose result has not come."""

    __slots__ = (
        "decodes",
        "features",
        "fenced",
        "finals",
        "lane",
        "late",
        "live",
        "partial",
        "sole",
        "step",
        "ticks",
        "timed",
    )

    def __init__(self, step: int, lane: Lane, ticks: bool) -> None:
        self.step = step
        self.lane = lane
        self.ticks = ticks  #: whether the lane's decodes run in it
        self.decodes = decodes = bytes(lane.bitmap.rstrip(b"\0")) if ticks else b""
        self.live = bytearray(decodes)  #: rows that count; bits are cleared when a sequence stops or is aborted
        self.finals: list[Sequence] = []  #: sequences whose last chunk this is: they sample their next token
        self.partial: list[Sequence] = []  #: sequences with a chunk that does not sample
        self.late: list[Sequence] = []  #: left the lane since: they take their token from the result directly
        self.fenced: list[int] = []  #: slots that may be used again when this result has come
        self.features: Features | None = None  #: what its time depends on, if that is to be learned
        #: The only client whose rows these are; -1 if there is none, or may be several.
        self.sole = next(iter(lane.owners)) if ticks and len(lane.owners) == 1 else -1
        self.timed: Timed | None = None  #: what was predicted of it, if the budget is in seconds


def named(records: Iterable[InFlight], owners: list[Sequence | None]) -> dict[Sequence, None]:
    """Every sequence of which a chunk or a token is computed in one of ``records``."""
    found: dict[Sequence, None] = {}
    for record in records:
        for seq in record.finals + record.partial:
            found[seq] = None
        for slot in bits(record.decodes):
            own = owners[slot]
            if own is not None:
                found[own] = None
    return found
