"""How every benchmark reports: rows with a value, a peer measured in the same run, and a goal."""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


@dataclass(frozen=True, slots=True)
class Row:
    """One figure. ``ratio`` is against ``peer`` (or a limit) measured in the same run; ``met`` says whether the goal
    was, None without one."""

    measure: str
    case: dict[str, Any]
    value: float
    unit: str
    peer: str | None = None
    ratio: float | None = None
    goal: float | None = None
    met: bool | None = None


@dataclass(slots=True)
class Report:
    """The rows of one benchmark."""

    benchmark: str
    rows: list[Row] = field(default_factory=list)

    def add(self, row: Row) -> None:
        self.rows.append(row)

    def show(self, as_json: bool) -> None:
        """One JSON object, or a table."""
        if as_json:
            json.dump({"benchmark": self.benchmark, "rows": [asdict(row) for row in self.rows]}, sys.stdout)
            print()
            return
        table = Table(title=f"{self.benchmark} ({machine()})", title_justify="left")
        for name in ("measure", "case", "value", "ratio", "against", "goal", "met"):
            table.add_column(name)
        for row in self.rows:
            table.add_row(
                row.measure,
                " ".join(f"{k}={v}" for k, v in row.case.items()),
                f"{row.value:.4g} {row.unit}",
                "" if row.ratio is None else f"{row.ratio:.3g}x",
                row.peer or "",
                "" if row.goal is None else f"{row.goal:g}",
                {True: "yes", False: "NO", None: ""}[row.met],
            )
        Console(width=None if sys.stdout.isatty() else 160).print(table)


def machine() -> str:
    """What a figure was measured on."""
    model = platform.processor() or platform.machine()
    try:
        with Path("/proc/cpuinfo").open() as info:
            model = next(line.split(":", 1)[1].strip() for line in info if line.startswith("model name"))
    except (OSError, StopIteration):
        pass
    return f"{model}, {os.cpu_count()} cores, Python {platform.python_version()}"


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="end within a minute, with fewer repetitions")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
