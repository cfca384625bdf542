"""From outcomes to figures. Pure arithmetic: seconds in, milliseconds out where a name ends in ``_ms``."""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .client import Outcome

#: A run is invalid if the client was late by more than this share of the median gap.
LAG_SHARE = 0.05
#: The percentiles that are reported.
PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Spread:
    """A sample's mean, percentiles (linear between neighbours, as numpy's) and maximum; all 0 if it is empty."""

    count: int
    mean: float
    p50: float
    p90: float
    p99: float
    most: float


@dataclass(frozen=True, slots=True)
class Objectives:
    """What counts as good, in seconds; None: anything."""

    ttft: float | None = None
    tbt: float | None = None


@dataclass(frozen=True, slots=True)
class Lags:
    """How late the client itself was, in seconds: ``send`` by request, ``read`` by read, ``wake`` by probe."""

    send: Spread
    read: Spread
    wake: Spread
    #: What the 99th percentile of each may be: a share of the median gap. 0 if there was no gap.
    limit: float

    @property
    def worst(self) -> float:
        return max(self.send.p99, self.read.p99, self.wake.p99)

    @property
    def valid(self) -> bool:
        return self.limit == 0 or self.worst <= self.limit


@dataclass(frozen=True, slots=True)
class Summary:
    """One run. Times in seconds, rates a second. ``good`` is None without objectives."""

    duration: float
    completed: int
    failed: int
    unfinished: int
    prompt_tokens: int
    output_tokens: int
    failures: dict[str, int]
    details: dict[str, str]
    good: int | None
    exact: bool
    chunks: int
    connect: Spread
    ttft: Spread
    tbt: Spread
    #: Of each request: the mean time of a token after the first.
    tpot: Spread
    e2e: Spread
    lags: Lags

    @property
    def requests_per_second(self) -> float:
        return self.completed / self.duration if self.duration else 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.output_tokens / self.duration if self.duration else 0.0

    @property
    def good_per_second(self) -> float | None:
        if self.good is None:
            return None
        return self.good / self.duration if self.duration else 0.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """Of values in ascending order; ``share`` from 0 to 100."""
    position = (len(ordered) - 1) * share / 100
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (position - below)


def spread(values: Iterable[float]) -> Spread:
    ordered = sorted(values)
    if not ordered:
        return Spread(0, 0.0, 0.0, 0.0, 0.0, 0.0)
    p50, p90, p99 = (percentile(ordered, share) for share in PERCENTILES)
    return Spread(len(ordered), sum(ordered) / len(ordered), p50, p90, p99, ordered[-1])


def _is_good(outcome: Outcome, objectives: Objectives) -> bool:
    """TTFT is met, and so is TBT by 99 of 100 gaps of the request."""
    if objectives.ttft is not None and time_to_first(outcome) > objectives.ttft:
        return False
    return objectives.tbt is None or not outcome.gaps or percentile(sorted(outcome.gaps), 99) <= objectives.tbt


def time_to_first(outcome: Outcome) -> float:
    """TTFT in seconds, from the moment the connection was begun."""
    assert outcome.first is not None
    return outcome.first - outcome.started


def succeeded(outcome: Outcome) -> bool:
    return not outcome.failure and not outcome.unfinished and outcome.first is not None


def summarise(outcomes: Sequence[Outcome], wakes: Iterable[float], objectives: Objectives) -> Summary:
    """``wakes``: what the probe of the event loop measured, in seconds.

    Tokens of streams that failed do not count, in no figure. Those of streams that the end of the run cut off do,
    but the streams are not among the completed ones.
    """
    done = [outcome for outcome in outcomes if succeeded(outcome)]
    timed = [outcome for outcome in outcomes if not outcome.failure and outcome.first is not None]
    failed = [outcome for outcome in outcomes if outcome.failure]
    begun = min((outcome.started for outcome in outcomes), default=0.0)
    ended = max((outcome.ended for outcome in outcomes if outcome.ended is not None), default=begun)
    gaps = array("d")
    for outcome in timed:
        gaps.extend(outcome.gaps)
    pauses = sorted(gap for gap in gaps if gap > 0)
    details: dict[str, str] = {}
    for outcome in failed:
        details.setdefault(outcome.failure, outcome.detail)
    counted = objectives.ttft is not None or objectives.tbt is not None
    return Summary(
        duration=ended - begun,
        completed=len(done),
        failed=len(failed),
        unfinished=sum(outcome.unfinished for outcome in outcomes),
        prompt_tokens=sum(outcome.prompt_tokens for outcome in timed),
        output_tokens=sum(outcome.tokens for outcome in timed),
        failures=dict(Counter(outcome.failure for outcome in failed).most_common()),
        details=details,
        good=sum(_is_good(outcome, objectives) for outcome in done) if counted else None,
        exact=bool(timed) and all(outcome.exact for outcome in timed),
        chunks=sum(outcome.chunks for outcome in timed),
        connect=spread(outcome.connected - outcome.started for outcome in timed if outcome.connected is not None),
        ttft=spread(time_to_first(outcome) for outcome in timed),
        tbt=spread(gaps),
        tpot=spread(sum(outcome.gaps) / len(outcome.gaps) for outcome in timed if outcome.gaps),
        e2e=spread(outcome.ended - outcome.started for outcome in done if outcome.ended is not None),
        lags=Lags(
            send=spread(max(0.0, outcome.started - outcome.due) for outcome in outcomes if outcome.due is not None),
            read=spread(late for outcome in outcomes for late in outcome.late),
            wake=spread(wakes),
            limit=LAG_SHARE * percentile(pauses, 50) if pauses else 0.0,
        ),
    )
