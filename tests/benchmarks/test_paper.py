"""The programs of ``benchmarks/paper``: each target has its program, and what needs no search holds."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PAPER = Path(__file__).parents[2] / "benchmarks" / "paper"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300, cwd=PAPER)


@pytest.mark.parametrize("program", ["tables.py", "iterations.py"])
def test_what_needs_no_run_holds(program: str) -> None:
    done = run(program, "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    for row in json.loads(done.stdout):
        assert row["holds"] or (row["target"]["kind"] == "report" and row["reason"]), row


_EVERY_TARGET = """
from cells import *
from cells import figure12, figure12_cells, figure13b, figure13b_cells, sweep, sweep_cells
from targets import targets
import iterations, tables
cells = [cell for bars in BARS for cell in bars.cells(2048, 3)] + list(figure12_cells().values())
cells += [*figure13b_cells(2048, 3).values(), *sweep_cells().values()]
for cell in cells:
    cell.scenario().models()
found = {cell.name: Found(Capacity(1.0, (1.0,)), 1, 1.0) for cell in cells}
rows = tables.rows() + iterations.rows() + [bars.row(found, 2048, 3) for bars in BARS]
rows += figure12(found) + figure13b(found, 2048, 3) + sweep(found)
names = [(row.target.id, row.target.setting, row.target.metric) for row in rows]
assert len(set(names)) == len(names)
missing = [t for t in targets() if (t.id, t.setting, t.metric) not in names and t.id not in ("T4", "F1a", "F1b")]
assert not missing, missing
print(len(targets()), len(names))
"""


def test_each_target_has_its_program() -> None:
    """Table 4 and Figure 1 are runs of their own (``runs.py``): nine more."""
    done = run("-c", _EVERY_TARGET)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["67", "58"]
