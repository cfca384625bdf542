"""From a record to figures. Microseconds in, seconds out."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .record import Record


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample's mean, percentiles (the least value that so many of a hundred do not exceed) and maximum, in seconds;
    all 0 if it is empty."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one run. ``duration``: from the first arrival to the last token."""

    requests: int
    finished: int
    duration: float
    prompt_tokens: int
    output_tokens: int
    ttft: Spread
    #: Times between tokens, and the same with a zero for each request's first token, as the paper pools them.
    tbt: Spread
    pooled_tbt: Spread
    #: From arrival to the start of the iteration with the first chunk.
    delay: Spread
    e2e: Spread

    @property
    def requests_per_second(self) -> float:
        return self.finished / self.duration if self.duration else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.duration if self.duration else 0.0


def spread(values: Iterable[int]) -> Spread:
    """Of microseconds."""
    return weighted([(value, 1) for value in values])


def weighted(pairs: Iterable[tuple[int, int]]) -> Spread:
    """Of microseconds, each so many times."""
    ordered = sorted(pairs)
    total = sum(number for _, number in ordered)
    if not total:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    mean = sum(value * number for value, number in ordered) / total
    p50, p90, p99 = _quantiles(ordered, total, (50, 90, 99))
    return Spread(total, mean / 1e6, p50 / 1e6, p90 / 1e6, p99 / 1e6, ordered[-1][0] / 1e6)


def _quantiles(ordered: Sequence[tuple[int, int]], total: int, shares: Sequence[int]) -> list[int]:
    """``shares``: whole percentages, ascending."""
    found: list[int] = []
    passed = 0
    entries = iter(ordered)
    value, number = next(entries)
    for share in shares:
        while 100 * (passed + number) < share * total:
            passed += number
            value, number = next(entries)
        found.append(value)
    return found


def summarise(record: Record) -> Figures:
    """The figures of all requests that came, as far as they got."""
    first = [at - came for at, came in zip(record.first, record.arrived, strict=True) if at >= 0]
    delays = [at - came for at, came in zip(record.scheduled, record.arrived, strict=True) if at >= 0]
    whole = [at - came for at, came in zip(record.ended, record.arrived, strict=True) if at >= 0]
    gaps = list(zip(record.gaps, record.counts, strict=True))
    begun = record.arrived[0] if record.arrived else 0
    return Figures(
        requests=len(record.arrived),
        finished=record.finished,
        duration=(record.now - begun) / 1e6,
        prompt_tokens=sum(n for n, at in zip(record.prompts, record.first, strict=True) if at >= 0),
        output_tokens=record.tokens,
        ttft=spread(first),
        tbt=weighted(gaps),
        pooled_tbt=weighted([(0, len(first)), *gaps]),
        delay=spread(delays),
        e2e=spread(whole),
    )
