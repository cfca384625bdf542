"""Everything of the paper that can be reproduced, as one page with pictures: ``benchmarks/out/paper/report.md``.

``--quick`` leaves out the capacity searches, except two groups with 512 requests and one seed. ``--json`` prints the
measures instead: targets within and outside their tolerance, reported, without a reason although they do not hold,
and not run; simulated iterations a second of CPU. Searches that the same code has made before are read, not run, so a
run that was ended goes on; what cannot begin within ``--minutes`` is listed as not run. ``--to DIR`` writes the page
there. ``--costs`` notes how long each search took, for the estimate of later runs.
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from capacities import searched
from cells import COSTS, Found, known_costs
from iterations import rows as iteration_rows
from pictures import draw
from runs import rows as run_rows
from store import OUT, code
from tables import rows as table_rows
from targets import Row, table, targets


def measures(rows: Sequence[Row], found: dict[str, Found]) -> dict[str, float]:
    """How many targets are what."""
    ran = {row.target for row in rows}
    must = [row for row in rows if row.target.kind != "report"]
    told = [row for row in rows if row.target.kind == "report"]
    seconds = sum(result.seconds for result in found.values())
    return {
        "targets_within": sum(row.holds for row in must),
        "targets_outside": sum(not row.holds for row in must),
        "targets_reported": len(told),
        "targets_unexplained": sum(not row.holds and not row.reason for row in told),
        "targets_not_run": sum(target not in ran for target in targets()),
        "iterations_per_s": sum(result.iterations for result in found.values()) / seconds if seconds else 0.0,
    }


def page(rows: Sequence[Row], counts: dict[str, float], pictures: Sequence[tuple[str, str]], how: str) -> str:
    """The report: by kind, then what was not run, then the pictures (file and title)."""
    lines = ["# The paper's figures, simulated", "", how, ""]
    lines.append(
        f"{counts['targets_within']:.0f} targets hold, {counts['targets_outside']:.0f} do not,"
        f" {counts['targets_reported']:.0f} are reported, {counts['targets_not_run']:.0f} were not run."
    )
    for kind, title in (
        ("fit", "Must lie within their tolerance"),
        ("order", "Must hold their order"),
        ("report", "Beside the paper, with the reason why they need not fit"),
    ):
        lines += ["", f"## {title}", "", table([row for row in rows if row.target.kind == kind])]
    ran = {row.target for row in rows}
    left = [target for target in targets() if target not in ran]
    if left:
        lines += ["", "## Not run", ""]
        lines += [f"- {target.id} ({target.kind}) {target.setting}: {target.metric}" for target in left]
    lines += ["", "## Pictures", ""]
    for file, title in pictures:
        lines += [f"![{title}]({file})", ""]
    return "\n".join(lines)


def note_costs(found: dict[str, Found]) -> None:
    """Keep what each search took, with what is known of others."""
    known = known_costs() | {name: result.seconds for name, result in found.items()}
    with COSTS.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("cell", "seconds"))
        writer.writerows((name, f"{seconds:.0f}") for name, seconds in sorted(known.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=90.0)
    parser.add_argument("--to", type=Path, default=OUT)
    parser.add_argument("--costs", action="store_true")
    arguments = parser.parse_args()
    rows = table_rows() + iteration_rows() + run_rows()
    more, found = searched(arguments.quick, arguments.jobs, arguments.minutes)
    rows += more
    counts = measures(rows, found)
    seconds = sum(result.seconds for result in found.values())
    form = "512 requests and one seed" if arguments.quick else "2,048 requests and three seeds; sweeps one"
    how = (
        f"Written by `benchmarks/paper/all.py{' --quick' if arguments.quick else ''}`; searches of {form};"
        f" {seconds / 60:.0f} minutes of CPU at {counts['iterations_per_s']:,.0f} iterations a second;"
        f" code `{code()}`."
    )
    arguments.to.mkdir(parents=True, exist_ok=True)
    drawn = draw(arguments.to, rows, found, arguments.quick)
    path = arguments.to / "report.md"
    path.write_text(page(rows, counts, drawn, how))
    if arguments.costs:
        note_costs(found)
    if arguments.json:
        print(json.dumps(counts))
    else:
        print(path.read_text())
        print(f"{counts['iterations_per_s']:,.0f} simulated iterations a second; {path}")
    return 1 if counts["targets_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
