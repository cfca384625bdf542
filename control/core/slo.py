"""Targets for the time between tokens: classes of requests, and how they are written on a command line."""

from __future__ import annotations

import re
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from ..wire import Submit

if TYPE_CHECKING:
    from .sequence import Sequence

#: The classes there are unless others are named, and their targets as multiples of the one given (the paper's strict
#: and relaxed targets are 5 and 25 times an unhindered decode).
DEFAULT_CLASSES = (("interactive", 1.0), ("relaxed", 5.0))
#: Targets in seconds, at least and at most.
LEAST_TARGET_S, MOST_TARGET_S = 0.001, 600.0

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s)?")
_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}")


@dataclass(frozen=True, slots=True)
class SloClass:
    """``tbt``: seconds between two tokens of a stream, at most. ``ttft``: seconds to the first one, infinite if there
    is no target. ``chunk``: most prompt tokens of one request in an iteration, 0 for any."""

    name: str
    tbt: float
    ttft: float = inf
    chunk: int = 0


@dataclass(frozen=True, slots=True)
class Slo:
    """The classes of a server. A request that names none is of the first."""

    classes: tuple[SloClass, ...]

    def find(self, name: str) -> SloClass | None:
        """The class of that name; the first for an empty one."""
        if not name:
            return self.classes[0]
        for found in self.classes:
            if found.name == name:
                return found
        return None

    @property
    def names(self) -> list[str]:
        """Of all classes."""
        return [found.name for found in self.classes]


def parse_slo(tbt: str, ttft: str | None = None) -> Slo:
    """``100ms``, or ``chat=80ms,batch=1s:256``: a class's target and, after a colon, its largest chunk.

    A bare duration is that of class interactive; relaxed has five times as much. A number without a unit is in
    milliseconds. ``ttft`` is written the same way, without chunks, for some or all of the classes. Raises
    ``ValueError`` with a sentence that names the flag.
    """
    classes = [SloClass(name, seconds, inf, chunk) for name, seconds, chunk in _entries("--tbt-slo", tbt)]
    first = dict[str, float]()
    if ttft is not None:
        for name, seconds, chunk in _entries("--ttft-slo", ttft):
            if chunk:
                raise ValueError(f"--ttft-slo {ttft!r}: a largest chunk belongs to --tbt-slo")
            first[name] = seconds
        if "=" in ttft:
            known = [found.name for found in classes]
            for name in first:
                if name not in known:
                    raise ValueError(f"--ttft-slo {ttft!r}: {name} is none of the classes {', '.join(known)}")
        else:
            # A bare duration: classes that --tbt-slo names have it all.
            for found in classes:
                first.setdefault(found.name, first[DEFAULT_CLASSES[0][0]])
    return Slo(tuple(SloClass(c.name, c.tbt, first.get(c.name, inf), c.chunk) for c in classes))


def _entries(flag: str, text: str) -> list[tuple[str, float, int]]:
    """Name, seconds and largest chunk of each class that ``text`` gives."""
    entries: list[tuple[str, float, int]] = []
    if "=" not in text:
        seconds, chunk = _target(flag, text, text)
        return [(name, seconds * times, chunk) for name, times in DEFAULT_CLASSES]
    for part in text.split(","):
        name, _, value = part.strip().partition("=")
        if _NAME.fullmatch(name) is None:
            raise ValueError(f"{flag} {text!r}: {name!r} is not a name such as interactive")
        if any(name == known for known, _, _ in entries):
            raise ValueError(f"{flag} {text!r} names {name} twice")
        entries.append((name, *_target(flag, text, value)))
    return entries


def _target(flag: str, text: str, value: str) -> tuple[float, int]:
    duration, colon, cap = value.strip().partition(":")
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f"{flag} {text!r}: {duration!r} is not a duration such as 100ms or 1.5s")
    seconds = float(match[1]) / (1.0 if match[2] == "s" else 1e3)
    if not LEAST_TARGET_S <= seconds <= MOST_TARGET_S:
        raise ValueError(f"{flag} {text!r}: a target is from 1ms to 600s")
    if not colon:
        return seconds, 0
    if not cap.isdigit() or not 1 <= int(cap) < 1 << 20:
        raise ValueError(f"{flag} {text!r}: {cap!r} is not a number of tokens from 1 to {(1 << 20) - 1}")
    return seconds, int(cap)


def slo_problem(submit: Submit, slo: Slo | None) -> tuple[str, str, str] | None:
    """Why a submission's class is refused: code, field and message."""
    if submit.tbt_ms and slo is not None:
        # The strictest that decodes decides for all: nobody may ask for more than the operator promises.
        least = round(1e3 * min(found.tbt for found in slo.classes))
        if submit.tbt_ms < least:
            return "invalid", "slo", f"a target must be at least {least} ms here, not {submit.tbt_ms}"
    if not submit.slo:
        return None
    names = [name for name, _ in DEFAULT_CLASSES] if slo is None else slo.names
    if submit.slo in names:
        return None
    return "invalid", "slo", f"there is no class {submit.slo!r}; there are {', '.join(names)}"


def set_targets(seq: Sequence, submit: Submit, slo: Slo, now: float) -> None:
    """Give ``seq``, which comes at ``now``, the targets of its class; a number of its own goes before that."""
    found = slo.find(submit.slo)
    if found is None:
        found = slo.classes[0]
    seq.tbt = submit.tbt_ms / 1e3 if submit.tbt_ms else found.tbt
    seq.chunk = found.chunk
    if len(seq.tokens) >> 2 == submit.prompt_len:
        # A continuation has had its first token.
        seq.first_due = now + found.ttft
