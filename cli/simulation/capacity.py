"""``evenflow capacity`` and ``evenflow tune``: the largest load within an SLO, and the token budget that serves it.

Exit codes: 0 done, 1 no load is within the SLO, 2 asked for what cannot be.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from ...dataplane.simulated.capacity import Capacity, Verdict, capacity
from ...dataplane.simulated.load import Entry
from ...dataplane.simulated.refusal import CannotSimulate
from ...dataplane.simulated.scenario import Scenario
from ..errors import UsageError
from .plots import draw_capacity, draw_curve
from .progress import Bar
from .setup import LoadFlags, SystemFlags, make_entries, make_scenario
from .simulate import describe, notes

#: A budget that loses less than this of the best capacity is as good.
AS_GOOD = 0.025


@dataclass(frozen=True, slots=True)
class Point:
    """The capacity with one token budget."""

    budget: int
    capacity: Capacity


def find_capacity(
    scenario: Scenario,
    entries: Sequence[Entry],
    slo: float,
    seeds: int,
    requests: int,
    start: float = 0.0,
    heard: Callable[[int, Verdict], None] | None = None,
) -> Capacity:
    """Raises ``UsageError`` if there are too few requests."""
    try:
        return capacity(scenario, entries, slo, seeds=range(seeds), requests=requests, start=start, heard=heard)
    except CannotSimulate as error:
        raise UsageError(str(error)) from None


def run_capacity(
    system: SystemFlags, load: LoadFlags, slo: float, seeds: int, as_json: bool, plot: Path | None
) -> int:
    """The command ``capacity``."""
    _check(seeds, load)
    scenario = make_scenario(system)
    requests = load.requests or 2048
    entries = make_entries(load, requests)
    verdicts: list[tuple[int, Verdict]] = []
    with Bar("searching", None, as_json) as bar:

        def heard(seed: int, verdict: Verdict) -> None:
            verdicts.append((seed, verdict))
            bar.show(len(verdicts), f"seed {seed}: {verdict.rate:.3g}/s {'held' if verdict.sustained else 'missed'}")

        found = find_capacity(scenario, entries, slo, seeds, requests, heard=heard)
    if as_json:
        told: dict[str, Any] = {
            "system": describe(scenario),
            "device_validated": scenario.device.validated,
            "slo_seconds": slo,
            "requests": requests,
            "capacity": found.rate,
            "interval": found.interval,
            "rates": found.rates,
            "extrapolated_share": found.extrapolated,
            "verdicts": [{"seed": seed, **asdict(verdict)} for seed, verdict in verdicts],
        }
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        lines = [describe(scenario), "", f"capacity    {in_words(found)}", ""]
        lines.append(f"{'requests/s':>12}{'seed':>6}{'P99 TBT ms':>12}{'median delay s':>16}")
        for seed, verdict in sorted(verdicts, key=lambda pair: (pair[1].rate, pair[0])):
            mark = "" if verdict.sustained else "   missed"
            lines.append(
                f"{verdict.rate:>12.3f}{seed:>6}{verdict.tbt_p99 * 1e3:>12.1f}{verdict.delay_p50:>16.2f}{mark}"
            )
        lines += [
            "",
            f"Sustained is a load whose P99 of all times between tokens is at most {slo * 1e3:g} ms and whose median"
            " scheduling delay is at most 2 s. A missed one is not simulated to its end.",
        ]
        print("\n".join(lines + notes(scenario) + not_measured(found)))
    if plot is not None:
        draw_capacity([verdict for _, verdict in verdicts], slo, plot)
    return 0 if found.rate else 1


def not_measured(found: Capacity) -> list[str]:
    """A warning, if the figure rests on what was not measured."""
    if not found.extrapolated:
        return []
    return [
        f"{found.extrapolated:.1%} of the iterations at that load were larger than any that was measured: their time"
        " is extrapolated."
    ]


def in_words(found: Capacity) -> str:
    interval = found.interval
    spread = "" if interval is None else f", 95 % interval {interval[0]:.3f} … {interval[1]:.3f} over seeds"
    return f"{found.rate:.3f} requests/s{spread}"


def run_tune(
    system: SystemFlags,
    load: LoadFlags,
    slo: float,
    seeds: int,
    budgets: Sequence[int],
    as_json: bool,
    plot: Path | None,
) -> int:
    """The command ``tune``."""
    _check(seeds, load)
    if system.policy not in ("stall-free", "chunked-only"):
        raise UsageError(f"--policy {system.policy} has no token budget to tune: it computes prompts whole")
    if system.tbt_slo is not None:
        raise UsageError("--tbt-slo bounds iterations by time: there is no token budget to tune")
    scenario = make_scenario(system)
    requests = load.requests or 1024
    entries = make_entries(load, requests)
    curve: list[Point] = []
    start = 0.0
    with Bar("token budgets", len(budgets), as_json) as bar:
        for budget in budgets:
            tried = replace(scenario, token_budget=budget)
            found = find_capacity(tried, entries, slo, seeds, requests, start)
            start = found.rate or start
            curve.append(Point(budget, found))
            bar.show(len(curve), f"{budget} tokens: {found.rate:.3g}/s")
    best = choose(curve)
    if as_json:
        told: dict[str, Any] = {
            "system": describe(replace(scenario, token_budget=best.budget)),
            "device_validated": scenario.device.validated,
            "slo_seconds": slo,
            "requests": requests,
            "token_budget": best.budget if best.capacity.rate else None,
            "capacity": best.capacity.rate,
            "curve": [
                {
                    "token_budget": point.budget,
                    "capacity": point.capacity.rate,
                    "interval": point.capacity.interval,
                    "extrapolated_share": point.capacity.extrapolated,
                }
                for point in curve
            ],
        }
        print(msgspec.json.format(msgspec.json.encode(told), indent=2).decode())
    else:
        print(curve_text(scenario, slo, curve, best))
    if plot is not None:
        draw_curve([(point.budget, point.capacity.rate) for point in curve], best.budget, slo, plot)
    return 0 if best.capacity.rate else 1


def choose(curve: Sequence[Point]) -> Point:
    """The smallest budget that is as good as the best: iterations are the shorter, and the cliff is the further."""
    most = max(point.capacity.rate for point in curve)
    return next(point for point in curve if point.capacity.rate >= (1 - AS_GOOD) * most)


def curve_text(scenario: Scenario, slo: float, curve: Sequence[Point], best: Point) -> str:
    """The whole curve, and what it is like on both sides of the best."""
    most = max(point.capacity.rate for point in curve) or 1.0
    lines = [describe(replace(scenario, token_budget=best.budget)), ""]
    lines.append(f"{'token budget':>14}{'requests/s':>12}{'of the best':>13}")
    for point in curve:
        rate = point.capacity.rate
        bar = "█" * round(24 * rate / most)
        mark = "  proposed" if point is best and rate else ""
        lines.append(f"{point.budget:>14}{rate:>12.3f}{100 * rate / most:>11.0f} %  {bar}{mark}")
    lines.append("")
    if not best.capacity.rate:
        lines.append(f"No budget keeps P99 TBT within {slo * 1e3:g} ms at any load: its decodes alone take longer.")
        return "\n".join(lines + notes(scenario))
    lines.append(
        f"--token-budget {best.budget} keeps P99 TBT within {slo * 1e3:g} ms up to {in_words(best.capacity)}."
    )
    half = [point for point in curve if point.capacity.rate < 0.5 * most]
    below = [point.budget for point in half if point.budget < best.budget]
    above = [point.budget for point in half if point.budget > best.budget]
    gentle = f"half is lost at {max(below)}" if below else f"{curve[0].budget} still serves more than half"
    cliff = f"half is lost at {min(above)}" if above else f"{curve[-1].budget} still serves more than half"
    lines.append(f"Below it the curve is gentle: {gentle}. Above it iterations outgrow the target: {cliff}.")
    return "\n".join(lines + notes(scenario) + not_measured(best.capacity))


def parse_budgets(text: str) -> list[int]:
    """``128:2048:128`` (from, to, step) or ``256,512,1024``. Raises ``UsageError``."""
    try:
        if ":" in text:
            first, last, step = (int(part) for part in text.split(":"))
            budgets = list(range(first, last + 1, step))
        else:
            budgets = sorted({int(part) for part in text.split(",")})
        if not budgets or not 1 <= budgets[0] <= budgets[-1] <= 1 << 20 or len(budgets) > 1000:
            raise ValueError
    except ValueError:
        raise UsageError(f"--budgets {text!r} is neither FROM:TO:STEP nor a list such as 256,512,1024") from None
    return budgets


def _check(seeds: int, load: LoadFlags) -> None:
    if not 1 <= seeds <= 100:
        raise UsageError(f"--seeds must be from 1 to 100, got {seeds}")
    if load.requests is not None and load.requests < 1:
        raise UsageError(f"--requests must be at least 1, got {load.requests}")
