"""The simulator at scale: a hundred replicas in one run, and a day of ten thousand by sampling.

``replicas``: that many under one control core, which routes a hundred thousand requests to them (Poisson, lengths of
the paper's chat trace), in this process. Memory must be bounded by what is unfinished: between a quarter of the
requests and the end the peak may grow by what the figures keep of each (docs/simulate.md), and no more.

``day``: a service of ``--service`` replicas whose load follows the hours. It is sampled in space and in time
(docs/simulate.md, A service by sampling): ``--sample`` of its replicas get their share of the arrivals, in windows
that are spread over the day, each after a warm-up that does not count. Figures are weighted by each window's share of
the day's requests; their interval is a bootstrap over windows. The same is done with half of the sample: what the two
differ by is what the sample's size decides.

Run: python benchmarks/scale.py [--quick] [--json] [--replicas N] [--requests N] [--service N] [--sample N]
"""

from __future__ import annotations

import random
import resource
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.figures import weighted
from evenflow.dataplane.simulated.load import Entry, arrival, poisson
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.traces import read_trace
from evenflow.dataplane.simulated.world import Arrival, World
from report import Report, Row, arguments

TRACE = Path(__file__).parent / "paper" / "data" / "openchat_sharegpt4_8k_lengths.csv.gz"
#: Requests a second and replica of a busy hour: about half of what mistral-7b on an H100 serves.
PEAK = 4.0
#: Load of each hour as a share of the busiest: a night, a morning, a dent at noon, an evening.
HOURS = [0.35, 0.28, 0.24, 0.22, 0.23, 0.28, 0.40, 0.58, 0.76, 0.90, 0.97, 0.98]
HOURS += [0.92, 0.94, 0.99, 1.00, 0.98, 0.95, 0.92, 0.90, 0.85, 0.74, 0.60, 0.46]
SCENARIO = Scenario(KNOWN["mistral-7b"], load_device("h100"), host="graphs", length=8192)
_RESAMPLED = 400
#: Requests from which on memory says something.
_TELLING = 20_000


def peak_bytes() -> int:
    """The most memory that this process ever had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def drawn(entries: list[Entry], rate: float, seed: int) -> Iterator[Arrival]:
    """Requests without end, made when they are asked for."""
    chance = random.Random(f"{seed}/lengths")
    for at in poisson(rate, seed):
        yield arrival(chance.choice(entries), at, SCENARIO.length)


def together(replicas: int, requests: int, entries: list[Entry], report: Report) -> None:
    """All in one run; memory after a quarter and at the end."""
    scenario = replace(SCENARIO, replicas=replicas)
    world = World(scenario.limits(), scenario.models())
    rate = PEAK * replicas
    load = drawn(entries, rate, 0)
    began = time.process_time()
    quarter = 0

    def look(world: World) -> bool:
        nonlocal quarter
        if not quarter and world.record.finished >= requests // 4:
            quarter = peak_bytes()
        return False

    world.feed(next(load) for _ in range(requests))
    world.run(stop=look)
    seconds = time.process_time() - began
    record, case = world.record, {"replicas": replicas, "requests": requests}
    if record.finished != requests or len(record.rejected):
        raise RuntimeError(f"{record.finished} of {requests} requests finished")
    grown = (peak_bytes() - quarter) / (0.75 * requests)
    report.add(Row("iterations_per_s", case, world.iterations / seconds, "1/s"))
    report.add(Row("requests_per_s", case, requests / seconds, "1/s"))
    report.add(Row("simulated_per_real", case, world.now / 1e6 / seconds, ""))
    report.add(Row("peak_memory", case, peak_bytes() / 1e6, "MB"))
    # 60 bytes a request and 12 an iteration for the figures; arrays that grow take up to twice as much.
    bound = 2 * (60 + 12 * world.iterations / requests) + 200
    # A short run ends before the allocator has what it needs: there the growth says nothing.
    told = requests >= _TELLING
    met = grown <= bound if told else None
    report.add(Row("bytes_per_request", case, grown, "B", goal=round(bound) if told else None, met=met))
    busiest = max(stage.busy_us[0] for stage in world.stages) / max(1, min(s.busy_us[0] for s in world.stages))
    report.add(Row("busiest_to_idlest_replica", case, busiest, ""))


class Window(NamedTuple):
    """What one window of a day saw: (microseconds, how many) of TTFT and of gaps, and its weight."""

    weight: float
    ttft: list[tuple[int, int]]
    tbt: list[tuple[int, int]]


def window(replicas: int, hour: int, seconds: float, warm: float, entries: list[Entry], seed: int) -> Window:
    """A window at the load of an hour. After ``warm`` count the requests that arrive and the gaps that end."""
    scenario = replace(SCENARIO, replicas=replicas)
    world = World(scenario.limits(), scenario.models())
    until, start = warm + seconds, round(warm * 1e6)
    load = drawn(entries, PEAK * HOURS[hour] * replicas, seed)
    world.feed(takewhile(lambda request: request.at < until * 1e6, load))
    world.run(until=start)
    before = len(world.record.gaps)
    world.run(until=round(until * 1e6))
    record = world.record
    waits = [
        (first - came, 1)
        for first, came in zip(record.first, record.arrived, strict=True)
        if came >= start and first >= 0
    ]
    gaps = list(zip(record.gaps[before:], record.counts[before:], strict=True))
    return Window(HOURS[hour], waits, gaps)


def coarse(one: Window) -> Window:
    """The same to three digits, in as few pairs as that makes: for figures that are computed very often."""

    def merged(pairs: list[tuple[int, int]]) -> list[tuple[int, int]]:
        counts: dict[int, int] = {}
        for value, number in pairs:
            step = 10 ** max(0, len(str(value)) - 3)
            counts[value // step * step] = counts.get(value // step * step, 0) + number
        return list(counts.items())

    return one._replace(ttft=merged(one.ttft), tbt=merged(one.tbt))


def figures(windows: list[Window]) -> dict[str, float]:
    """Percentiles of the whole day in milliseconds, each window counting as much as its hour has requests."""
    told: dict[str, float] = {}
    for name in ("ttft", "tbt"):
        pairs: list[tuple[int, int]] = []
        for one in windows:
            mine: list[tuple[int, int]] = getattr(one, name)
            total = sum(number for _, number in mine) or 1
            # So many of a million, for percentiles of whole counts.
            pairs += [(value, max(1, round(1e6 * one.weight * number / total))) for value, number in mine]
        spread = weighted(pairs)
        told |= {f"{name}_p50_ms": spread.p50 * 1e3, f"{name}_p99_ms": spread.p99 * 1e3}
    return told


def day(service: int, sample: int, windows: int, seconds: float, entries: list[Entry], report: Report) -> None:
    """A day of ``service`` replicas by ``sample`` of them in ``windows`` windows."""
    found: dict[int, dict[str, float]] = {}
    for size in (sample, max(1, sample // 2)):
        began = time.process_time()
        hours = [int((number + 0.5) * 24 / windows) for number in range(windows)]
        seen = [
            window(size, hour, seconds, seconds / 2, entries, 1000 * size + number)
            for number, hour in enumerate(hours)
        ]
        found[size] = figures(seen)
        if size != sample:
            continue
        chance = random.Random(7)
        rough = [coarse(one) for one in seen]
        again = [figures([chance.choice(rough) for _ in rough]) for _ in range(_RESAMPLED)]
        case = {"service": service, "sample": sample, "windows": windows, "seconds": seconds}
        for name, value in found[size].items():
            values = sorted(figure[name] for figure in again)
            low, high = values[int(0.025 * _RESAMPLED)], values[int(0.975 * _RESAMPLED)]
            report.add(Row(name, {**case, "low": f"{low:.1f}", "high": f"{high:.1f}"}, value, "ms"))
        report.add(Row("day_cpu_seconds", case, time.process_time() - began, "s"))
        daily = PEAK * sum(HOURS) * 3600 * service
        report.add(Row("requests_of_the_day", case, daily, ""))
    for name, value in found[sample].items():
        other = found[max(1, sample // 2)][name]
        report.add(
            Row(f"{name}_half_sample", {"sample": sample // 2}, other, "ms", ratio=other / value, peer="sample")
        )


def main() -> int:
    parser = arguments(__doc__)
    parser.add_argument("--replicas", type=int, default=100)
    parser.add_argument("--requests", type=int, default=None)
    parser.add_argument("--service", type=int, default=10_000)
    parser.add_argument("--sample", type=int, default=None)
    options = parser.parse_args()
    entries = read_trace(TRACE)
    report = Report("scale")
    requests = options.requests or (2_000 if options.quick else 100_000)
    together(options.replicas if not options.quick else min(options.replicas, 20), requests, entries, report)
    sample = options.sample or (4 if options.quick else 32)
    if not 2 <= sample <= options.service:
        parser.error(f"--sample must be from 2 to {options.service}, got {sample}")
    day(options.service, sample, 6 if options.quick else 24, 10.0 if options.quick else 30.0, entries, report)
    report.show(options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
