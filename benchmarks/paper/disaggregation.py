"""Disaggregated or chunked: which design serves more on equal hardware (the question that section 6 leaves open).

Four A100 with Mistral-7B each: all four compute prompts in chunks beside their decodes (stall-free, the best of three
budgets), or some compute whole prompts for the others to decode (Splitwise, DistServe), which their KV blocks reach
by a link; the best split counts. Capacity is the largest rate of Poisson arrivals with P90 of TTFT and P99 of all
times between tokens within their targets; the gap after the first token holds the move. Arrivals come for twenty
times the target of the first token, so that a queue that grows by a tenth is seen. Lengths are spread evenly by a
half around each point of the grid. Memory is counted on all four: blocks of a prompt stay where it was computed until
they have moved.

A cell is the ratio of disaggregated to chunked: above 1 disaggregation wins. ``--quick`` takes four points and two
links. ``--picture FILE`` draws the diagram. Searches are kept as those of ``cells.py``.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import cycle, takewhile
from pathlib import Path

from evenflow.dataplane.simulated.capacity import ceiling, largest
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.load import Entry, arrivals, poisson
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.world import World
from store import kept

DEVICES = 4
LENGTH = 16384
#: GB/s: between nodes in pairs, across a DGX's nodes, 400 Gbit/s, NVLink in pairs (the account of the paper).
LINKS = (2.4, 7.8, 50.0, 300.0)
PROMPTS, OUTPUTS = (512, 2048, 8192), (64, 256, 1024)
#: Seconds: P99 between tokens, P90 to the first one.
TARGETS = {"strict": (0.05, 1.0), "relaxed": (0.2, 4.0)}
BUDGETS = (256, 512, 1024)
PRECISION = 0.06
#: Lengths that are drawn, over and over; arrivals last for so many times the target of the first token.
SAMPLE, DURATION = 256, 20


@dataclass(frozen=True, slots=True)
class Design:
    """``prompts``: devices that compute prompts for the others, 0 if all do both, with chunks of ``budget``."""

    prompts: int = 0
    budget: int = 512
    link: float = 300.0

    @property
    def name(self) -> str:
        if not self.prompts:
            return f"chunks of {self.budget}"
        return f"{self.prompts} + {DEVICES - self.prompts} at {self.link:g} GB/s"


@dataclass(frozen=True, slots=True)
class Point:
    """Mean lengths, and targets by name."""

    prompt: int
    output: int
    target: str


def entries(point: Point) -> list[Entry]:
    """Lengths from a half to one and a half times the means."""
    chance = random.Random(f"{point.prompt}/{point.output}")

    def length(mean: int) -> int:
        return chance.randint(mean - mean // 2, mean + mean // 2)

    return [Entry(length(point.prompt), length(point.output)) for _ in range(SAMPLE)]


def scenario(design: Design) -> Scenario:
    return Scenario(
        KNOWN["mistral-7b"],
        load_device("a100-pcie"),
        replicas=DEVICES,
        length=LENGTH,
        host="graphs",
        token_budget=design.budget,
        prefill_replicas=design.prompts,
        prefill_tokens=4096,
        kv_link=design.link,
    )


def sustained(design: Design, sample: Sequence[Entry], rate: float, tbt: float, ttft: float) -> bool:
    """Whether ``rate`` is served within the targets; given up as soon as it cannot be."""
    chosen = scenario(design)
    limits = chosen.limits()
    world = World(limits, chosen.models(), link=chosen.link())
    record = world.record
    record.limit = round(tbt * 1e6)
    ttft_us = round(ttft * 1e6)
    times = takewhile(lambda at: at < DURATION * ttft, poisson(rate, 0))
    load = list(arrivals(cycle(sample), times, limits.max_model_len))
    tokens, most_late = sum(arrival.output for arrival in load), len(load) // 10

    def missed(world: World) -> bool:
        late = sum(
            (at if at >= 0 else world.now) - came > ttft_us
            for at, came in zip(record.first, record.arrived, strict=True)
        )
        return late > most_late or 100 * record.over > tokens

    world.feed(load)
    return world.run(stop=missed, every=256) and not missed(world)


def search(design: Design, point: Point) -> float:
    """Requests a second, the largest that are sustained."""
    tbt, ttft = TARGETS[point.target]

    def make() -> dict[str, float]:
        sample = entries(point)
        start = ceiling(scenario(Design()), sample)
        return {"rate": largest(lambda rate: sustained(design, sample, rate, tbt, ttft), start, 1.5, PRECISION)}

    settings = {"design": asdict(design), "point": asdict(point), "targets": [tbt, ttft]}
    settings |= {"sample": SAMPLE, "duration": DURATION, "precision": PRECISION}
    return kept(f"disaggregation-{design.prompts}-{point.prompt}-{point.output}", settings, make)["rate"]


@dataclass(frozen=True, slots=True)
class Cell:
    """What a point gave: capacity of the best chunked design, and by link that of the best split, with names."""

    point: Point
    chunked: float
    chunks: str
    split: dict[str, float]
    splits: dict[str, str]

    def ratio(self, link: float) -> float:
        return self.split[f"{link:g}"] / self.chunked if self.chunked else 0.0


def measure(point: Point, links: Sequence[float], budgets: Sequence[int]) -> Cell:
    chunked, chunks = 0.0, "none"
    for budget in budgets:
        rate = search(Design(0, budget), point)
        if rate > chunked:
            chunked, chunks = rate, f"{budget}"
    split: dict[str, float] = {}
    splits: dict[str, str] = {}
    for link in links:
        best, name = 0.0, "none"
        for prompts in range(1, DEVICES):
            rate = search(Design(prompts, 512, link), point)
            if rate > best:
                best, name = rate, f"{prompts}+{DEVICES - prompts}"
        split[f"{link:g}"], splits[f"{link:g}"] = best, name
    return Cell(point, chunked, chunks, split, splits)


def table(cells: Sequence[Cell], links: Sequence[float]) -> str:
    """The diagram as Markdown: capacity of chunks, then for each link the ratio and the best split."""
    heads = ["targets", "prompt", "output", "chunks, req/s (budget)", *(f"at {link:g} GB/s" for link in links)]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for cell in cells:
        point = cell.point
        row = [point.target, str(point.prompt), str(point.output), f"{cell.chunked:.2f} ({cell.chunks})"]
        for link in links:
            row.append(f"{cell.ratio(link):.2f} ({cell.splits[f'{link:g}']})")
        lines.append("| " + " | ".join(row) + " |")
    return "\n".join(lines)


def draw(path: Path, cells: Sequence[Cell], links: Sequence[float]) -> None:
    """A panel for each link and target: prompts up, outputs across; blue where disaggregation wins."""
    from matplotlib.figure import Figure

    names = sorted({cell.point.target for cell in cells}, reverse=True)
    prompts = sorted({cell.point.prompt for cell in cells})
    outputs = sorted({cell.point.output for cell in cells})
    figure = Figure(figsize=(2.1 * len(links) + 0.8, 2.0 * len(names) + 0.6), layout="constrained")
    panels = figure.subplots(len(names), len(links), squeeze=False)
    for row, name in enumerate(names):
        for column, link in enumerate(links):
            axes = panels[row][column]
            at = {(c.point.prompt, c.point.output): c.ratio(link) for c in cells if c.point.target == name}
            grid = [[at.get((prompt, output), 0.0) for output in outputs] for prompt in prompts]
            axes.imshow(grid, origin="lower", cmap="RdBu", vmin=0.0, vmax=2.0, aspect="auto")
            for y, line in enumerate(grid):
                for x, ratio in enumerate(line):
                    axes.annotate(f"{ratio:.2f}", (x, y), ha="center", va="center", fontsize=8)
            axes.set_xticks(range(len(outputs)), [str(n) for n in outputs], fontsize=7)
            axes.set_yticks(range(len(prompts)), [str(n) for n in prompts], fontsize=7)
            axes.set_title(f"{name}, {link:g} GB/s", fontsize=8)
    figure.supxlabel("output tokens", fontsize=8)
    figure.supylabel("prompt tokens", fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--picture", type=Path)
    arguments = parser.parse_args()
    quick = arguments.quick
    links = (LINKS[0], LINKS[-1]) if quick else LINKS
    prompts, outputs = ((512, 8192), (64, 256)) if quick else (PROMPTS, OUTPUTS)
    targets = ("strict",) if quick else tuple(TARGETS)
    budgets = (256, 512) if quick else BUDGETS
    points = [Point(p, o, t) for t in targets for p in prompts for o in outputs]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        cells = list(pool.map(measure, points, [links] * len(points), [budgets] * len(points)))
    if arguments.json:
        print(json.dumps([asdict(cell) for cell in cells]))
    else:
        print(table(cells, links))
    if arguments.picture:
        draw(arguments.picture, cells, links)
    return 0


if __name__ == "__main__":
    sys.exit(main())
