"""What is sent and when: arrival times, prompt and output lengths. Pure: the same seed gives the same plan.

Arrivals, lengths and prompts draw from generators of their own, so that another rate sends the same requests.
"""

import csv
import io
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count, islice, takewhile
from typing import Generic, Literal, TypeVar

from ..errors import UsageError

Arrivals = Literal["poisson", "constant"]
#: Longest prompt or output that may be asked for, in tokens.
MAX_TOKENS = 2**21
#: Tokens at the beginning of a prompt that are drawn for it alone.
_OWN = 16
T = TypeVar("T", int, str)


@dataclass(frozen=True, slots=True)
class Planned:
    """One request: when, in seconds from the start (None: as soon as another ends), and its lengths in tokens."""

    index: int
    at: float | None
    prompt: int
    output: int


@dataclass(frozen=True, slots=True)
class Length:
    """A distribution of token counts: ``N``, ``A:B`` (uniform, both included), or ``lognormal:MEAN:SIGMA[:MAX]``.

    MEAN is the mean in tokens, SIGMA the standard deviation of the logarithm; values are cut to 1 … MAX.
    """

    kind: Literal["fixed", "uniform", "lognormal"]
    low: float
    high: float
    most: int = MAX_TOKENS

    def draw(self, chance: random.Random) -> int:
        if self.kind == "fixed":
            return int(self.low)
        if self.kind == "uniform":
            return chance.randint(int(self.low), int(self.high))
        # A lognormal's mean is exp(mu + sigma²/2).
        value = self.low * chance.lognormvariate(-self.high * self.high / 2, self.high)
        return max(1, min(round(value), self.most))


def parse_length(text: str, flag: str) -> Length:
    """Raises ``UsageError``, which names ``flag``."""
    parts = text.split(":")
    try:
        if parts[0] == "lognormal" and len(parts) in (3, 4):
            most = _tokens(parts[3]) if len(parts) == 4 else MAX_TOKENS
            mean, sigma = float(parts[1]), float(parts[2])
            if not (1 <= mean <= MAX_TOKENS and 0 <= sigma <= 10):
                raise ValueError
            return Length("lognormal", mean, sigma, most)
        if parts[0] == "uniform":
            parts = parts[1:]
            if len(parts) != 2:
                raise ValueError
        if len(parts) == 1:
            return Length("fixed", _tokens(parts[0]), 0)
        if len(parts) == 2 and _tokens(parts[0]) <= _tokens(parts[1]):
            return Length("uniform", _tokens(parts[0]), _tokens(parts[1]))
    except ValueError:
        pass
    raise UsageError(
        f"{flag} {text!r} is none of N, A:B and lognormal:MEAN:SIGMA[:MAX]"
        f" (tokens from 1 to {MAX_TOKENS}, A at most B, SIGMA from 0 to 10)"
    )


def _tokens(text: str) -> int:
    value = int(text)
    if not 1 <= value <= MAX_TOKENS:
        raise ValueError
    return value


def parse_seconds(text: str, flag: str) -> float:
    """``200ms``, ``0.2s`` and ``0.2`` are the same. Raises ``UsageError``, which names ``flag``."""
    number, scale = (text[:-2], 1e-3) if text.endswith("ms") else (text.removesuffix("s"), 1.0)
    try:
        value = float(number) * scale
    except ValueError:
        value = 0.0
    if not 0 < value < 1e9:
        raise UsageError(f"{flag} {text!r} is no time above 0, such as 200ms or 1.5s")
    return value


def arrival_times(arrivals: Arrivals, rate: float, seed: int) -> Iterator[float]:
    """Seconds from the start, without end: ``rate`` a second."""
    if arrivals == "constant":
        yield from (index / rate for index in count())
        return
    chance = random.Random(f"{seed}/arrivals")
    at = 0.0
    while True:
        yield at
        at += chance.expovariate(rate)


def plan(
    prompt: Length,
    output: Length,
    *,
    rate: float | None,
    arrivals: Arrivals = "poisson",
    seed: int = 0,
    requests: int | None = None,
    duration: float | None = None,
) -> Iterator[Planned]:
    """Requests in the order in which they are sent. ``rate`` None: a closed loop, without times of its own.

    ``duration`` in seconds ends the arrivals; a closed loop ends by the clock instead, which is the sender's.
    """
    lengths = random.Random(f"{seed}/lengths")
    times = arrival_times(arrivals, rate, seed) if rate is not None else (None for _ in count())
    if duration is not None:
        times = takewhile(lambda at: at is None or at < duration, times)
    for index, at in enumerate(islice(times, requests)):
        yield Planned(index, at, prompt.draw(lengths), output.draw(lengths))


def read_trace(text: str, name: str, *, requests: int | None = None, duration: float | None = None) -> list[Planned]:
    """A CSV file with the columns arrival (seconds), prompt and output (tokens), in any order; others are ignored.

    Raises ``UsageError``, which names the line.
    """
    reader = csv.DictReader(io.StringIO(text))
    columns = {column.strip().lower(): column for column in reader.fieldnames or ()}
    missing = [column for column in ("arrival", "prompt", "output") if column not in columns]
    if missing:
        raise UsageError(f"{name}: the first line must name the columns arrival,prompt,output; no {missing[0]}")
    rows: list[tuple[float, int, int]] = []
    for row in reader:
        try:
            at = float(row[columns["arrival"]])
            if not 0 <= at < 1e9:
                raise ValueError
            rows.append((at, _tokens(row[columns["prompt"]]), _tokens(row[columns["output"]])))
        except (TypeError, ValueError):
            raise UsageError(
                f"{name}, line {reader.line_num}: arrival must be seconds from 0, prompt and output tokens"
                f" from 1 to {MAX_TOKENS}"
            ) from None
    rows.sort(key=lambda row: row[0])
    kept = [row for row in rows if duration is None or row[0] < duration][:requests]
    if not kept:
        raise UsageError(f"{name} has no request")
    return [Planned(index, *row) for index, row in enumerate(kept)]


class Prompts(Generic[T]):
    """Prompts out of ``choices``, token ids or words: random from the first to the last, cheap to make.

    Each begins with a few draws of its own, so that no two share a prefix that a cache could keep; the rest is
    cut out of one long draw.
    """

    def __init__(self, choices: Sequence[T], seed: int) -> None:
        self._choices = choices
        self._seed = seed
        self._long = random.Random(f"{seed}/prompts").choices(choices, k=1 << 14)

    def make(self, index: int, length: int) -> list[T]:
        """The prompt of the request ``index``: always the same under the same seed."""
        chance = random.Random(f"{self._seed}/prompt/{index}")
        own = chance.choices(self._choices, k=min(length, _OWN))
        start = chance.randrange(len(self._long))
        rest = self._long[start : start + length - len(own)]
        while len(own) + len(rest) < length:
            rest += self._long[: length - len(own) - len(rest)]
        return own + rest
