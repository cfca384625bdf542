"""Feeds a journal's events to the very core that runs in the control process, and compares what it plans."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from ..core.engine import Engine
from ..core.events import Effect
from ..wire import Result, Submit
from .files import JournalError, JournalFile
from .image import ImageError, load
from .records import (
    Answered,
    Came,
    Closed,
    Happened,
    Opening,
    Outcome,
    Piece,
    Planned,
    Turned,
    Up,
    event_of,
    limits_of,
)
from .redaction import widened
from .shadow import check, difference, outcomes

#: Slots of all lanes of a replica: a bound on the memory that a file can ask for.
_MOST_SLOTS = 1 << 19


@dataclass(slots=True)
class Step:
    """An event and what the journal says came of it. ``number`` counts from 0 in the file."""

    number: int
    event: Happened
    outcomes: list[Outcome] = field(default_factory=list[Outcome])


class Journal:
    """A journal as it is read. ``opening`` and ``engine``, as it was at the beginning, are there at once."""

    def __init__(self, path: Path) -> None:
        """Raises ``JournalError``."""
        self.file = JournalFile(path)
        self.closed: Closed | None = None
        self._records = iter(self.file)
        opening = next(self._records, None)
        assert isinstance(opening, Opening)
        self.opening = opening
        pieces: list[bytes] = []
        for _ in range(opening.pieces):
            piece = next(self._records, None)
            if not isinstance(piece, Piece):
                raise JournalError(f"{path}: the state at its beginning is not whole")
            pieces.append(piece.data)
        self.limits = limits_of(opening.limits)
        try:
            self.engine = load(b"".join(pieces), self.limits) if pieces else Engine(self.limits)
        except ImageError as error:
            raise JournalError(f"{path} begins in the middle of a run: {error}") from None

    def steps(self) -> Iterator[Step]:
        """Raises ``JournalError``."""
        step: Step | None = None
        number = 0
        width = self.opening.width
        for record in self._records:
            if isinstance(record, Planned | Turned):
                if step is None:
                    raise JournalError(f"{self.file.path}: a plan without an event before it")
                step.outcomes.append(record)
                continue
            if step is not None:
                yield step
                step = None
            if isinstance(record, Closed):
                self.closed = record
                continue
            if isinstance(record, Opening | Piece):
                raise JournalError(f"{self.file.path}: a beginning in the middle of the file")
            if isinstance(record, Up) and record.stages * record.num_slots > _MOST_SLOTS:
                raise JournalError(f"{self.file.path}: a replica of {record.stages} stages, {record.num_slots} slots")
            if width < 4:
                record = _wide(record, width)
            step = Step(number, record)
            number += 1
        if step is not None and self.closed is not None:
            # Of a journal that was not closed the last step's plans may be missing.
            yield step

    @property
    def note(self) -> str:
        """Once all steps have been read: what is missing, if anything is."""
        if self.file.note:
            return self.file.note
        if self.closed is None:
            return "it was not closed: the process was killed, or still runs"
        return self.closed.reason


def _wide(record: Happened, width: int) -> Happened:
    if isinstance(record, Came):
        submit = widened(record.submit, width)
        assert isinstance(submit, Submit)
        return Came(record.now, record.owner, submit)
    if isinstance(record, Answered):
        result = widened(record.result, width)
        assert isinstance(result, Result)
        return Answered(record.now, record.replica, result, record.starved_us)
    return record


@dataclass(slots=True)
class Replayed:
    """What came of a replay. ``problem``: lines for people on the first difference, empty if there is none."""

    events: int = 0
    plans: int = 0
    submissions: int = 0
    refusals: int = 0
    seconds: float = 0.0
    problem: list[str] = field(default_factory=list[str])
    note: str = ""


def replay(journal: Journal, watch: Callable[[Step, list[Effect]], None] | None = None) -> Replayed:
    """Run all of ``journal``, up to the first difference. ``watch`` sees each step and the core's effects. Raises
    ``JournalError``."""
    engine, ids = journal.engine, journal.opening.ids
    done = Replayed()
    first: float | None = None
    for step in journal.steps():
        event = step.event
        first = event.now if first is None else first
        done.seconds = event.now - first
        try:
            effects = engine.step(event_of(event), event.now)
        except Exception as error:
            # What made a control process fail fails again, and is told like any other difference.
            done.problem = [_where(step, done), f"the core fails: {type(error).__name__}: {error}"]
            return done
        if watch is not None:
            watch(step, effects)
        done.events += 1
        done.submissions += isinstance(event, Came)
        for outcome in step.outcomes:
            done.plans += isinstance(outcome, Planned)
            done.refusals += isinstance(outcome, Turned)
        found = difference(step.outcomes, outcomes(effects, ids))
        if found:
            done.problem = [_where(step, done), *found, check(engine)]
            return done
    done.note = journal.note
    return done


def _where(step: Step, done: Replayed) -> str:
    return f"event {step.number}, {done.seconds:.6f} s from the start: {_told(step.event)}"


def _told(event: Happened) -> str:
    """An event in a few words."""
    if isinstance(event, Came):
        submit = event.submit
        return f"client {event.owner} submits {submit.key}, {submit.prompt_len} tokens of prompt"
    if isinstance(event, Answered):
        result = event.result
        return f"replica {event.replica} returns step {result.step} of epoch {result.epoch}, lane {result.lane}"
    fields = [f"{name} {getattr(event, name)}" for name in event.__struct_fields__ if name not in ("now", "profile")]
    return f"{type(event).__name__} {', '.join(fields)}".strip()
