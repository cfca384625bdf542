"""Turns what a control process hands over into files of bounded size.

Runs in a process of its own (``__main__``), so that hashing, compressing and writing cost the control process
nothing. It runs a second core on the very events that it writes: so it knows which row of a result belongs to whom,
notices at once if a journal could not be replayed, and can begin a file at any time with the core's state.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

from msgspec import structs

from ..core.engine import Engine
from ..core.events import Returned, Submitted
from ..wire import Result, Submit
from .files import frame, head
from .image import dump
from .recorder import Item
from .records import (
    NOBODY,
    Answered,
    Came,
    Cancelled,
    Closed,
    Happened,
    Opening,
    Outcome,
    Piece,
    Planned,
    Record,
    Turned,
    event_of,
    limits_of,
    record_of,
    settings_of,
)
from .redaction import Redactor, narrowed, plain_limits, width_for
from .shadow import difference, outcomes, shaped

#: Bytes of an image in one record.
_PIECE = 4 << 20
#: A frame is written when its records have about so many bytes, and whenever it is told.
_FRAME_BYTES = 512 << 10

_INVALID = Turned("invalid")


class JournalStop(Exception):
    """No more can be written. The text says why."""


class Writer:
    """``path`` and its predecessor, ``path`` with ``.1`` added, together take at most about ``most`` bytes. ``key``:
    of the hashes that stand for ids."""

    def __init__(self, path: Path, most: int, key: bytes, program: str = "") -> None:
        self.path = path
        self.note = ""  #: why the journal could not be replayed, if it could not
        self.parts = 0  #: files begun
        self._most = most // 2
        self._key = key
        self._program = program
        self._opening: Opening | None = None
        self._engine: Engine | None = None
        self._redactor: Redactor | None = None
        self._file: BinaryIO | None = None
        self._size = 0
        self._held: list[Record] = []
        self._held_bytes = 0
        self._event: Happened | None = None
        self._outcomes: list[Outcome] = []

    def take(self, items: list[Item]) -> None:
        """What was recorded, in order; an event and all that came of it are in the same list."""
        now = 0.0
        for item in items:
            if isinstance(item, float | int):
                now = item
            elif isinstance(item, Planned | Turned):
                self._outcomes.append(item)
            elif isinstance(item, Opening):
                self._open(item)
            else:
                self._settle()
                if isinstance(item, Closed):
                    self._hold(item)
                else:
                    self._event = record_of(item, now)
        self._settle()

    def flush(self) -> None:
        """Let what was taken be in the file."""
        file, records = self._file, self._held
        if file is None or not records:
            return
        self._held, self._held_bytes = [], 0
        data = frame(records)
        file.write(data)
        file.flush()
        self._size += len(data)
        if self._size > self._most:
            self.next_part()

    def close(self) -> None:
        """Write what there is, and end."""
        self.flush()
        if self._file is not None:
            self._file.close()
            self._file = None

    # ---- events ----------------------------------------------------------------------------------------------

    def _settle(self) -> None:
        """The last event and all that came of it are known: run it here too, and write it."""
        event, self._event = self._event, None
        outcomes_, self._outcomes = self._outcomes, []
        if event is None or self._engine is None or self._opening is None:
            return
        ids = self._opening.ids
        if not ids:
            event = self._redact(event, outcomes_)
            outcomes_ = [shaped(outcome) for outcome in outcomes_ if outcome != _INVALID]
        written = event
        width = self._opening.width
        if isinstance(event, Came):
            submit = narrowed(event.submit, width)
            assert isinstance(submit, Submit)
            written = Came(event.now, event.owner, submit)
        elif isinstance(event, Answered):
            result = narrowed(event.result, width)
            assert isinstance(result, Result)
            written = Answered(event.now, event.replica, result, event.starved_us)
        self._hold(written)
        for outcome in outcomes_:
            self._hold(outcome)
        if not self.note:
            effects = self._engine.step(event_of(event), event.now)
            if self._redactor is not None:
                self._redactor.note(effects)
            found = difference(outcomes_, outcomes(effects, ids))
            if found:
                self.note = "; ".join(found)
        if self._held_bytes >= _FRAME_BYTES:
            self.flush()

    def _redact(self, event: Happened, came_of_it: list[Outcome]) -> Happened:
        redactor = self._redactor
        assert redactor is not None
        if isinstance(event, Came):
            if _INVALID in came_of_it:
                return Cancelled(event.now, NOBODY, 0)
            found = redactor.submitted(Submitted(event.owner, event.submit))
            return Came(event.now, found.owner, found.submit)
        if isinstance(event, Answered):
            returned = redactor.returned(Returned(event.replica, event.result, event.starved_us))
            return Answered(event.now, returned.replica, returned.result, returned.starved_us)
        return event

    # ---- files -----------------------------------------------------------------------------------------------

    def _hold(self, record: Record) -> None:
        self._held.append(record)
        self._held_bytes += 64
        if isinstance(record, Came):
            self._held_bytes += len(record.submit.tokens)
        elif isinstance(record, Answered):
            self._held_bytes += len(record.result.ids)
        elif isinstance(record, Planned):
            self._held_bytes += sum(map(len, record.frames))
        elif isinstance(record, Piece):
            self._held_bytes += len(record.data)

    def _open(self, opening: Opening) -> None:
        limits, width = limits_of(opening.limits), 4
        if not opening.ids:
            limits, width = plain_limits(limits), width_for(limits.block_size)
        opening = structs.replace(opening, program=self._program, limits=settings_of(limits), width=width)
        self._opening = opening
        self._engine = Engine(limits)
        self._redactor = None if opening.ids else Redactor(self._engine, self._key, limits)
        self._begin(opening, [])

    def next_part(self) -> None:
        """Begin another file with the core's present state."""
        opening, engine = self._opening, self._engine
        assert opening is not None and engine is not None
        if self.note:
            raise JournalStop(f"the journal is full, and cannot begin anew: {self.note}")
        image = dump(engine)
        pieces = [Piece(image[i : i + _PIECE]) for i in range(0, len(image), _PIECE)]
        self._opening = opening = structs.replace(opening, part=opening.part + 1, pieces=len(pieces))
        self._begin(opening, pieces)
        if self._size > self._most:
            raise JournalStop(f"the state of the core alone takes {self._size} bytes of {self._most} for a file")

    def _begin(self, opening: Opening, pieces: list[Piece]) -> None:
        """The next file; what is there by that name is the one before."""
        if self._file is not None:
            self._file.write(frame([Closed()]))
            self._file.close()
        if self.path.exists():
            self.path.replace(self.path.with_name(f"{self.path.name}.1"))
        # Not even shapes of prompts are for everybody.
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._file = os.fdopen(descriptor, "wb")
        self._size = self._file.write(head())
        for record in (opening, *pieces):
            self._size += self._file.write(frame([record]))
        self._file.flush()
        self.parts += 1
