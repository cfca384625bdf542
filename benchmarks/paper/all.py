"""Everything of the paper that can be reproduced, as one page: ``benchmarks/out/paper/report.md``.

``--quick`` leaves out the capacity searches, except two cells with 512 requests and one seed. ``--json`` prints the
measures instead: targets within and outside their tolerance, reported, without a reason although they do not hold,
and not run; simulated iterations a second of CPU. Capacity cells that have been searched before are read, not run.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from cells import OUT, Found, all_rows, quick_rows
from iterations import rows as iteration_rows
from runs import rows as run_rows
from tables import rows as table_rows
from targets import Row, Target, table, targets


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


def page(rows: Sequence[Row], counts: dict[str, float], left: Sequence[Target]) -> str:
    """The report: by kind, and what was not run."""
    lines = ["# The paper's figures, simulated", ""]
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
    if left:
        lines += ["", "## Not run", ""]
        lines += [f"- {target.id} {target.setting}: {target.metric}" for target in left]
    return "\n".join(lines) + "\n"


def main() -> int:
    quick = "--quick" in sys.argv[1:]
    rows = table_rows() + iteration_rows() + run_rows()
    searched, found = quick_rows() if quick else all_rows()
    rows += searched
    counts = measures(rows, found)
    ran = {row.target for row in rows}
    OUT.mkdir(parents=True, exist_ok=True)
    path = OUT / "report.md"
    path.write_text(page(rows, counts, [target for target in targets() if target not in ran]))
    if "--json" in sys.argv[1:]:
        print(json.dumps(counts))
    else:
        print(path.read_text())
        print(f"{counts['iterations_per_s']:,.0f} simulated iterations a second; {path}")
    return 1 if counts["targets_outside"] else 0


if __name__ == "__main__":
    sys.exit(main())
