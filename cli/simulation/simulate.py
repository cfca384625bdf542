"""``evenflow simulate``: one load on one system, and what its users would see.

Exit codes: 0 done, 2 asked for what cannot be, 130 interrupted.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from ...control.bubbles import CAUSES, BubbleAccount
from ...control.core.events import SendPlan
from ...control.wire import Result
from ...dataplane.simulated.capacity import MOST_DELAY_S
from ...dataplane.simulated.figures import Figures, Spread, summarise
from ...dataplane.simulated.profiled import Profile, extrapolated
from ...dataplane.simulated.record import Record
from ...dataplane.simulated.scenario import Scenario
from ...dataplane.simulated.world import World
from ..errors import UsageError
from .perfetto import Timeline
from .plots import draw_run
from .progress import Bar
from .setup import LoadFlags, SystemFlags, make_load, make_scenario


@dataclass(frozen=True, slots=True)
class Stage:
    """Where the time of a stage went, in seconds: iterations, and idle time between them by cause."""

    replica: int
    stage: int
    busy: float
    idle: dict[str, float]


@dataclass(frozen=True, slots=True)
class Simulated:
    """What came out. ``saturated``: requests waited longer and longer. ``beyond``: iterations larger than any that
    was measured, on a device with a profile. ``seconds``: that it took to simulate, of this process's CPU."""

    figures: Figures
    iterations: int
    preemptions: int
    cached_tokens: int
    rejected: int
    stages: list[Stage]
    saturated: bool
    beyond: int
    seconds: float


def simulate(
    scenario: Scenario, load: LoadFlags, *, timeline: Timeline | None = None, quiet: bool = True
) -> tuple[Simulated, World]:
    """Run it to its end. Raises ``UsageError``."""
    accounts = [BubbleAccount(scenario.stages) for _ in range(scenario.replicas)]

    def watch(send: SendPlan, results: list[Result]) -> None:
        account = accounts[send.replica]
        account.planned(send)
        for stage, result in enumerate(results):
            account.returned(stage, result)
        if timeline is not None:
            timeline.add(send, results)

    limits = scenario.limits()
    requests, total = make_load(load, limits.max_model_len)
    world = World(limits, scenario.models(), watch=watch)
    world.feed(requests)
    began = time.process_time()
    with Bar("simulating", total, quiet) as bar:

        def show(world: World) -> bool:
            bar.show(world.record.finished)
            return False

        world.run(stop=show)
    engine = world.engine
    replicas = engine.replicas.values()
    stages = [
        Stage(
            index,
            number,
            stage.busy_us / 1e6,
            {cause: us / 1e6 for cause, us in zip(CAUSES, stage.causes, strict=True)},
        )
        for index, account in enumerate(accounts)
        for number, stage in enumerate(account.accounts)
    ]
    simulated = Simulated(
        summarise(world.record),
        world.iterations,
        sum(replica.preemptions for replica in replicas),
        sum(replica.cache_hits for replica in replicas),
        len(world.record.rejected),
        stages,
        is_saturated(world.record),
        extrapolated(stage.cost for stage in world.stages),
        time.process_time() - began,
    )
    return simulated, world


def run_simulate(
    system: SystemFlags, load: LoadFlags, as_json: bool, trace_out: Path | None, plot: Path | None
) -> int:
    """The command."""
    scenario = make_scenario(system)
    timeline = None if trace_out is None else Timeline(scenario.stages)
    simulated, world = simulate(scenario, load, timeline=timeline, quiet=as_json)
    if not simulated.figures.requests:
        raise UsageError("the load has no request")
    if as_json:
        print(msgspec.json.format(msgspec.json.encode(as_object(scenario, simulated)), indent=2).decode())
    else:
        print(text(scenario, simulated))
    if timeline is not None and trace_out is not None:
        timeline.write(trace_out)
        print(f"{trace_out}: open it at https://ui.perfetto.dev", file=sys.stderr)
    if plot is not None:
        draw_run(world.record, plot)
    return 0


def describe(scenario: Scenario) -> str:
    """In a line."""
    parts = f"{scenario.replicas} times " if scenario.replicas > 1 else ""
    parts += f"{scenario.shape.name} on {scenario.ranks * scenario.stages} {scenario.device.name}"
    if scenario.ranks > 1:
        parts += f", {scenario.ranks} tensor-parallel ranks"
    if scenario.stages > 1:
        parts += f", {scenario.stages} stages"
    budget = f" {scenario.token_budget} tokens" if scenario.policy in ("stall-free", "chunked-only") else ""
    return f"{parts}, {scenario.policy}{budget}, at most {scenario.max_num_seqs} sequences"


def text(scenario: Scenario, simulated: Simulated) -> str:
    """A table, then what must be known to believe it."""
    figures = simulated.figures
    lines = [
        describe(scenario),
        "",
        f"{'requests':<22}{figures.finished} completed of {figures.requests}, {simulated.rejected} refused",
        f"{'duration':<22}{figures.duration:.2f} s",
        f"{'throughput':<22}{figures.requests_per_second:.2f} requests/s,"
        f" {figures.tokens_per_second:.1f} output tokens/s",
        f"{'tokens':<22}{figures.prompt_tokens} of prompts ({simulated.cached_tokens} cached),"
        f" {figures.output_tokens} of output",
        f"{'preemptions':<22}{simulated.preemptions}",
        f"{'iterations':<22}{simulated.iterations}",
        "",
        f"{'milliseconds':<22}{'mean':>10}{'P50':>10}{'P90':>10}{'P99':>10}{'max':>10}",
    ]
    rows: list[tuple[str, Spread]] = [
        ("TTFT", figures.ttft),
        ("TBT", figures.tbt),
        ("scheduling delay", figures.delay),
        ("E2E", figures.e2e),
    ]
    for name, spread in rows:
        if simulated.saturated and name != "TBT":
            lines.append(f"{name:<22}{'past saturation':>20}")
        elif spread.count:
            values = (spread.mean, spread.p50, spread.p90, spread.p99, spread.most)
            lines.append(f"{name:<22}" + "".join(f"{value * 1e3:>10.2f}" for value in values))
    lines += ["", f"{'idle seconds':<22}" + "".join(f"{name:>10}" for name in ("busy", *CAUSES))]
    for stage in simulated.stages[:16]:
        lines.append(
            f"{f'replica {stage.replica}, stage {stage.stage}':<22}{stage.busy:>10.2f}"
            + "".join(f"{seconds:>10.2f}" for seconds in stage.idle.values())
        )
    if len(simulated.stages) > 16:
        lines.append(f"… and {len(simulated.stages) - 16} more stages")
    rate = simulated.iterations / simulated.seconds if simulated.seconds else 0.0
    lines += ["", f"Simulated in {simulated.seconds:.1f} s: {rate:,.0f} iterations/s."]
    if simulated.saturated:
        lines.append(
            "Past saturation: requests wait longer and longer, so TTFT, delay and E2E are as long as the load is, and"
            " are not foretold. evenflow capacity finds the load that is served."
        )
    if simulated.beyond:
        lines.append(
            f"{simulated.beyond} of {simulated.iterations} iterations were larger than any that was measured: their"
            " time is extrapolated."
        )
    return "\n".join(lines + notes(scenario))


def is_saturated(record: Record) -> bool:
    """Whether waits kept growing: those who came in the last quarter waited seconds, and twice as long as those of
    the second."""
    delays = [
        (at if at >= 0 else record.now) - came for at, came in zip(record.scheduled, record.arrived, strict=True)
    ]
    quarter = len(delays) // 4
    if quarter < 8:
        return False
    second, last = median(delays[quarter : 2 * quarter]), median(delays[3 * quarter :])
    return last > MOST_DELAY_S * 1e6 and last > 2 * second


def notes(scenario: Scenario) -> list[str]:
    """What must be known to believe a figure."""
    device = scenario.device
    if isinstance(device, Profile):
        tried = device.probes or device.fit
        return [f"Measured on {device.title}: iterations within {tried.p50:.1%} (P50) and {tried.p90:.1%} (P90)."]
    if not device.validated:
        return [f"Not validated: {device.title} is described from data sheets, nothing of it was measured."]
    scaled = [part for part in ("prefill", "decode") if part not in device.measured]
    if scaled:
        return [f"Attention ({' and '.join(scaled)}) of the {device.title} is scaled from another device."]
    return []


def as_object(scenario: Scenario, simulated: Simulated) -> dict[str, Any]:
    """Ready for JSON. Times in seconds; past saturation those that only say how long the load was are ``None``."""
    figures = simulated.figures
    held = not simulated.saturated
    return {
        "system": describe(scenario),
        "device_validated": scenario.device.validated,
        "past_saturation": simulated.saturated,
        "requests": figures.requests,
        "completed": figures.finished,
        "refused": simulated.rejected,
        "duration": figures.duration,
        "request_throughput": figures.requests_per_second,
        "output_throughput": figures.tokens_per_second,
        "total_input_tokens": figures.prompt_tokens,
        "total_output_tokens": figures.output_tokens,
        "cached_tokens": simulated.cached_tokens,
        "preemptions": simulated.preemptions,
        "iterations": simulated.iterations,
        "extrapolated_iterations": simulated.beyond,
        "ttft": asdict(figures.ttft) if held else None,
        "tbt": asdict(figures.tbt),
        "pooled_tbt": asdict(figures.pooled_tbt),
        "scheduling_delay": asdict(figures.delay) if held else None,
        "e2e": asdict(figures.e2e) if held else None,
        "stages": [asdict(stage) for stage in simulated.stages],
        "cpu_seconds": simulated.seconds,
    }
