"""The largest load that a scenario serves within its SLO, by the paper's definition (section 5.1).

A rate is sustained if the 99th percentile of all times between tokens (each request's first token enters as 0) is
within the target and the median scheduling delay is at most 2 s. What is beyond is found early: once more gaps than
one in a hundred of all tokens that can come are too long, or more than half of the requests have waited too long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import sqrt
from statistics import fmean, stdev

from .cost import Work
from .load import Entry, arrivals, poisson, shuffled
from .profiled import extrapolated
from .refusal import CannotSimulate
from .scenario import Scenario
from .world import World

#: Seconds of the median scheduling delay, at most.
MOST_DELAY_S = 2.0
#: The search ends when it knows the rate to this share of itself.
PRECISION = 0.025
#: Arrivals are cut off after so many seconds.
TIME_LIMIT_S = 1800.0
#: A run has at least so many times the requests that can run at once: else its queue tells nothing.
LEAST_TURNS = 4
#: Two-sided 95 % points of Student's distribution, by degrees of freedom.
_STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)


@dataclass(frozen=True, slots=True)
class Verdict:
    """Of one rate. Times in seconds; lower bounds if the run was ended early. ``iterations`` that it took, of which
    ``extrapolated`` were larger than any that was measured, on a device with a profile."""

    rate: float
    sustained: bool
    tbt_p99: float
    delay_p50: float
    iterations: int
    extrapolated: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """``rate``: the mean over seeds of the largest sustained rates, in requests a second, each in ``rates``.
    ``extrapolated``: the share of the iterations at these rates that were larger than any that was measured."""

    rate: float
    rates: tuple[float, ...]
    extrapolated: float = 0.0

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 % confidence interval of the mean over seeds, None for one seed."""
        n = len(self.rates)
        if n < 2:
            return None
        half = _STUDENT[min(n - 2, len(_STUDENT) - 1)] * stdev(self.rates) / sqrt(n)
        return self.rate - half, self.rate + half


def judge(
    scenario: Scenario,
    entries: Sequence[Entry],
    rate: float,
    slo: float,
    seed: int = 0,
    *,
    limit: float = TIME_LIMIT_S,
    progress: Callable[[World], None] | None = None,
) -> Verdict:
    """Run ``entries`` at ``rate`` requests a second against a target of ``slo`` seconds."""
    limits = scenario.limits()
    world = World(limits, scenario.models(), link=scenario.link())
    record = world.record
    record.limit = round(slo * 1e6)
    times = takewhile(lambda at: at < limit, poisson(rate, seed))
    coming = list(arrivals(entries, times, limits.max_model_len))
    tokens = sum(arrival.output for arrival in coming)
    late_us = round(MOST_DELAY_S * 1e6)
    half = len(coming) / 2
    failed = False

    def hopeless(world: World) -> bool:
        nonlocal failed
        if progress is not None:
            progress(world)
        late = sum(
            (at if at >= 0 else world.now) - came > late_us
            for at, came in zip(record.scheduled, record.arrived, strict=True)
        )
        failed = 100 * record.over > tokens or late > half
        return failed

    world.feed(coming)
    world.run(until=round(limit * 1e6), stop=hopeless)
    given = record.tokens
    over = failed or 100 * record.over > given
    waits = sorted(
        (at if at >= 0 else world.now) - came for at, came in zip(record.scheduled, record.arrived, strict=True)
    )
    delay = waits[len(waits) // 2] if waits else 0
    return Verdict(
        rate,
        not over and delay <= late_us,
        _p99(record.gaps, record.counts, given),
        delay / 1e6,
        world.iterations,
        extrapolated(stage.cost for stage in world.stages),
    )


def _p99(gaps: Iterable[int], counts: Iterable[int], tokens: int) -> float:
    """Of all tokens: those without a gap are zeros."""
    left = tokens // 100
    for gap, number in sorted(zip(gaps, counts, strict=True), reverse=True):
        left -= number
        if left < 0:
            return gap / 1e6
    return 0.0


def largest(test: Callable[[float], bool], start: float, step: float = 1.5, precision: float = PRECISION) -> float:
    """The largest rate that passes, to ``precision`` of itself, from the first guess ``start`` in steps of ``step``;
    0 if none does down to a thousandth of that. Nothing beyond a million times that is tried.

    What is missed is known sooner than what is held, so a guess is better too large than too small.
    """
    low, high, rate = 0.0, 0.0, start
    while not (low and high):
        if test(rate):
            low = rate
            rate *= step
            if low > start * 1e6:
                return low
        else:
            high = rate
            rate /= step
            if high < start / 1000:
                return 0.0
    while high - low > precision * high:
        rate = sqrt(low * high)
        if test(rate):
            low = rate
        else:
            high = rate
    return low


def ceiling(scenario: Scenario, entries: Sequence[Entry]) -> float:
    """More than about what the scenario can serve of such requests, by the cost of a mean one."""
    cost, rows = scenario.cost(), scenario.max_num_seqs
    prompt = max(1, round(fmean(entry.prompt for entry in entries)))
    output = fmean(entry.output for entry in entries)
    read = Work(prompt, 0, 0, [(prompt, 0)], 1, 0.0)
    write = Work(rows, rows, round(rows * (prompt + output / 2)), [], rows, 0.0)
    slowest = max(cost.stage_us(n, read) + cost.stage_us(n, write) * output / rows for n in range(cost.stages))
    return 1.1e6 * scenario.replicas / slowest


def capacity(
    scenario: Scenario,
    entries: Sequence[Entry],
    slo: float,
    *,
    seeds: Sequence[int] = (0,),
    requests: int = 2048,
    start: float = 0.0,
    limit: float = TIME_LIMIT_S,
    heard: Callable[[int, Verdict], None] | None = None,
) -> Capacity:
    """Search for each seed, which decides both the requests and their arrivals. ``heard`` is told each verdict.
    ``start``: a rate that it may be near, 0 if nothing is known.

    Raises ``CannotSimulate`` if there are too few requests.
    """
    least = LEAST_TURNS * scenario.max_num_seqs * scenario.replicas
    if min(requests, len(entries)) < least:
        raise CannotSimulate(
            f"{min(requests, len(entries))} requests are too few to see a queue where {least // LEAST_TURNS} run at"
            f" once: it takes {least}"
        )
    rates: list[float] = []
    iterations = beyond = 0
    for seed in seeds:
        chosen = shuffled(entries, seed, requests)
        verdicts: dict[float, Verdict] = {}

        def test(
            rate: float, seed: int = seed, chosen: Sequence[Entry] = chosen, verdicts: dict[float, Verdict] = verdicts
        ) -> bool:
            verdict = verdicts[rate] = judge(scenario, chosen, rate, slo, seed, limit=limit)
            if heard is not None:
                heard(seed, verdict)
            return verdict.sustained

        near = rates[-1] if rates and rates[-1] else start
        rates.append(largest(test, 1.05 * near, 1.15) if near else largest(test, ceiling(scenario, chosen)))
        if rates[-1] in verdicts:
            iterations += verdicts[rates[-1]].iterations
            beyond += verdicts[rates[-1]].extrapolated
    return Capacity(fmean(rates), tuple(rates), beyond / iterations if iterations else 0.0)
