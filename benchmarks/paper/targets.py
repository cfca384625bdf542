"""The paper's figures, and ours beside them: what all programs in this folder print."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple

from evenflow.dataplane.simulated.cost import DeviceCost, Work
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.load import Entry
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.traces import read_trace

DATA = Path(__file__).parent / "data"
CHAT, ARXIV = "openchat_sharegpt4_8k_lengths", "arxiv16k_synth"


@dataclass(frozen=True, slots=True)
class Target:
    """One row of ``targets.csv``."""

    id: str
    kind: str
    setting: str
    metric: str
    value: str
    tolerance: str
    prototype: str


class Bar(NamedTuple):
    """One figure of ours beside the paper's, which is None if it has none."""

    label: str
    ours: float
    paper: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What we get for a target. ``holds``: within its tolerance, or in its order. ``reason``: why it need not fit.
    ``bars``: what a picture shows of it."""

    target: Target
    ours: str
    holds: bool
    reason: str = ""
    bars: tuple[Bar, ...] = ()


def targets() -> list[Target]:
    """All of them, in the file's order."""
    with (DATA / "targets.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return [Target(**{field: row[field] for field in Target.__dataclass_fields__}) for row in rows]


def find(name: str, setting: str = "", metric: str = "") -> Target:
    """The one target of that id whose setting and metric contain these words."""
    found = [
        target
        for target in targets()
        if target.id == name and setting in target.setting and (metric in target.metric if metric else True)
    ]
    if len(found) != 1:
        raise LookupError(f"{len(found)} targets are {name} {setting!r} {metric!r}")
    return found[0]


def trace(name: str) -> list[Entry]:
    """The lengths of a trace of this folder."""
    return read_trace(DATA / f"{name}.csv.gz")


def device_cost(
    model: str, ranks: int = 1, stages: int = 1, device: str = "a100-pcie", host: str = "graphs"
) -> DeviceCost:
    return DeviceCost(load_device(device), KNOWN[model], ranks=ranks, stages=stages, host=host)


def prefill(tokens: int, before: int = 0) -> Work:
    """An iteration of one chunk."""
    return Work(tokens, 0, 0, [(tokens, before)], 1, 0.0)


def decodes(rows: int, context: int) -> Work:
    """An iteration of decodes alone."""
    return Work(rows, rows, rows * context, [], rows, 0.0)


def mixed(rows: int, context: int, tokens: int, before: int = 0) -> Work:
    """An iteration of decodes and a chunk."""
    return Work(rows + tokens, rows, rows * context, [(tokens, before)], rows + 1, 0.0)


def near(ours: float, paper: float, tolerance: float) -> bool:
    """Within a relative tolerance."""
    return abs(ours / paper - 1) <= tolerance


def middle(values: Iterable[float]) -> float:
    return median(values)


def table(rows: Sequence[Row]) -> str:
    """Ours beside the paper's, in Markdown."""
    lines = [
        "| target | kind | setting | paper | ours | tolerance | holds |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        t = row.target
        mark = "yes" if row.holds else "no" if t.kind != "report" else f"no: {row.reason}"
        cells = (t.id, t.kind, f"{t.setting}: {t.metric}", t.value, row.ours, t.tolerance, mark)
        lines.append("| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines)


def run(rows: Callable[[], list[Row]]) -> None:
    """A program of this folder: print its rows; ``--json`` as one object. Exit code 1 if a row that must hold does
    not."""
    found = rows()
    if "--json" in sys.argv[1:]:
        print(json.dumps([asdict(row) for row in found], indent=1))
    else:
        print(table(found))
    missed = [row for row in found if not row.holds and row.target.kind != "report"]
    sys.exit(1 if missed else 0)
