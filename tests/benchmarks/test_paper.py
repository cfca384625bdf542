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
from capacities import parts
from cells import Found
from evenflow.dataplane.simulated.capacity import Capacity
from pictures import PLAIN
from targets import targets
import iterations, tables
rows = tables.rows() + iterations.rows()
for part in parts(quick=False):
    for cell in part.cells:
        cell.scenario().models()
    rows += part.rows({cell.name: Found(Capacity(1.0, (1.0,)), 1, 1.0) for cell in part.cells})
names = [(row.target.id, row.target.setting, row.target.metric) for row in rows]
assert len(set(names)) == len(names)
missing = [t for t in targets() if (t.id, t.setting, t.metric) not in names and t.id not in ("T4", "F1a", "F1b")]
assert not missing, missing
drawn = {name for ids, *_ in PLAIN.values() for name in ids}
curves = {"T2", "F4", "F5", "F6"}
assert {target.id for target in targets()} == drawn | curves, "a figure has no picture"
assert all(row.bars for row in rows if row.target.id in drawn - {"F12"})
print(len(targets()), len(names))
"""


def test_each_target_has_its_program_and_picture() -> None:
    """Table 4 and Figure 1 are runs of their own (``runs.py``): nine more."""
    done = run("-c", _EVERY_TARGET)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["67", "58"]


_KEPT = """
import sys
from pathlib import Path
import store
store.OUT = Path(sys.argv[1]) / "out"
root = Path(sys.argv[1]) / "copy"
calls = []
def make():
    calls.append(1)
    return {"rate": 2.5}
assert store.kept("a", {"n": 1}, make) == store.kept("a", {"n": 1}, make) == {"rate": 2.5}
assert len(calls) == 1
store.kept("a", {"n": 2}, make)
assert len(calls) == 2, "other settings are another result"
for path in store.sources():
    to = root / path.relative_to(store.ROOT)
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_bytes(path.read_bytes())
devices = root / "dataplane" / "simulated" / "devices"
devices.mkdir()
for path in (store.ROOT / "dataplane" / "simulated" / "devices").glob("*.json"):
    (devices / path.name).write_bytes(path.read_bytes())
assert store.code(root) == store.code()
core = root / "control" / "core" / "stall_free.py"
core.write_text(core.read_text() + "\\n# A comment changes nothing.\\n")
store.code.cache_clear()
assert store.code(root) == store.code()
core.write_text(core.read_text() + "\\nMORE = 1\\n")
store.code.cache_clear()
assert store.code(root) != store.code(), "other code is another result"
"""


def test_a_result_is_kept_by_its_settings_and_code(tmp_path: Path) -> None:
    done = run("-c", _KEPT, str(tmp_path))
    assert done.returncode == 0, done.stderr
