"""Pictures of simulations. Needs matplotlib (the extra ``plot``)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from ...dataplane.simulated.capacity import MOST_DELAY_S, Verdict
from ...dataplane.simulated.record import Record
from ..errors import UsageError


def figure(rows: int, columns: int, size: tuple[float, float]) -> tuple[Any, list[Any]]:
    """A figure and its axes. Raises ``UsageError`` without matplotlib."""
    try:
        import matplotlib
        from matplotlib import pyplot
    except ModuleNotFoundError:
        raise UsageError("plots need matplotlib: pip install evenflow[plot]") from None
    matplotlib.use("Agg")
    drawn, axes = pyplot.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained")
    return drawn, [axis for row in axes for axis in row]


def save(drawn: Any, path: Path) -> None:
    """Raises ``UsageError`` if that cannot be."""
    try:
        drawn.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: {error}") from None


def draw_run(record: Record, path: Path) -> None:
    """Distributions of TTFT, of gaps between tokens and of scheduling delays, and when tokens stalled."""
    drawn, axes = figure(1, 3, (13, 3.6))
    pairs = sorted(zip(record.gaps, record.counts, strict=True))
    total = sum(number for _, number in pairs) or 1
    passed, xs, ys = 0, list[float](), list[float]()
    for gap, number in pairs:
        passed += number
        xs.append(gap / 1e3)
        ys.append(passed / total)
    axes[0].plot(xs, ys)
    axes[0].set(title="time between tokens", xlabel="ms", ylabel="share of gaps", xscale="log")
    axes[0].axhline(0.99, color="grey", linewidth=0.6)
    for axis, title, ends in (
        (axes[1], "time to first token", record.first),
        (axes[2], "scheduling delay", record.scheduled),
    ):
        axis.plot(*_cdf((at - came) / 1e6 for at, came in zip(ends, record.arrived, strict=True) if at >= 0))
        axis.set(title=title, xlabel="s", ylabel="share of requests")
    save(drawn, path)


def _cdf(values: Iterable[float]) -> tuple[list[float], list[float]]:
    ordered = sorted(values)
    return ordered, [(place + 1) / len(ordered) for place in range(len(ordered))]


def draw_capacity(verdicts: Sequence[Verdict], slo: float, path: Path) -> None:
    """P99 TBT and median scheduling delay by rate, of what was sustained and what was not."""
    drawn, axes = figure(1, 2, (9, 3.6))
    for axis, title, pick, limit in (
        (axes[0], "P99 time between tokens (ms)", lambda v: v.tbt_p99 * 1e3, slo * 1e3),
        (axes[1], "median scheduling delay (s)", lambda v: v.delay_p50, MOST_DELAY_S),
    ):
        for held, colour in ((True, "tab:green"), (False, "tab:red")):
            some = [verdict for verdict in verdicts if verdict.sustained is held]
            axis.scatter([v.rate for v in some], [pick(v) for v in some], color=colour, s=14)
        axis.axhline(limit, color="grey", linewidth=0.8)
        axis.set(title=title, xlabel="requests/s", yscale="log")
    save(drawn, path)


def draw_curve(points: Sequence[tuple[int, float]], best: int, slo: float, path: Path) -> None:
    """Capacity by token budget."""
    drawn, axes = figure(1, 1, (6, 3.6))
    axes[0].plot([budget for budget, _ in points], [rate for _, rate in points], marker="o", markersize=3)
    axes[0].axvline(best, color="grey", linewidth=0.8)
    axes[0].set(title=f"P99 TBT within {slo * 1e3:g} ms", xlabel="token budget", ylabel="requests/s", ylim=(0, None))
    save(drawn, path)
