"""The whole control plane under faults, in virtual time: any seed that fails is a bug. It prints the one command that
repeats it; with ``--shrink`` that makes it smaller."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from faultsim.scenario import Cut, draw
from faultsim.shrink import Case, shrink
from faultsim.stage import LightStage
from faultsim.world import run

PROGRAM = Path(__file__).parent
SEEDS, EVENTS = 200, 500
#: As many tests, so that the suite's processes share them.
PARTS = 20


@pytest.mark.parametrize("part", range(PARTS))
def test_seeds(part: int) -> None:
    for seed in range(part, SEEDS, PARTS):
        report = run(seed, EVENTS)
        assert report.problem is None, f"{report.problem}\n  {Case(seed, EVENTS).command()}\n{report.trace}"


def test_a_seed_gives_the_same_run_again() -> None:
    for seed in (2, 3, 5):
        assert run(seed, EVENTS) == run(seed, EVENTS)


def test_scenarios_cover_what_they_should() -> None:
    scenarios = [draw(seed, EVENTS) for seed in range(SEEDS)]
    assert {s.stages for s in scenarios} == {1, 2, 3, 4}
    assert {s.replicas for s in scenarios} == {1, 2, 3}
    faults = {getattr(what, "kind", None) for s in scenarios for _, what in s.happenings} - {None}
    assert len(faults) >= 15
    for field in ("policy", "admission"):
        if hasattr(scenarios[0].limits, field):
            assert len({getattr(s.limits, field) for s in scenarios}) > 1


def test_events_of_a_longer_run_begin_alike() -> None:
    shorter, longer = draw(7, 300), draw(7, 600)
    assert [h for h in longer.happenings if h[0] < 300] == shorter.happenings


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Case:
    """A case that fails: workers that sometimes sample a wrong id."""
    draws = LightStage._draw

    def drawn(stage: LightStage, row, state: int) -> int:
        return draws(stage, row, state) + (row.start + row.count == 12)

    monkeypatch.setattr(LightStage, "_draw", drawn)
    for seed in range(20):
        if run(seed, EVENTS).problem is not None:
            return Case(seed, EVENTS)
    raise AssertionError("twenty seeds have not noticed")


def test_a_failing_seed_is_made_smaller(broken: Case) -> None:
    case, report = shrink(broken)
    assert report.problem is not None and "an undisturbed run gives" in report.problem
    left = draw(case.seed, case.events).without(case.cut).happenings
    assert len(left) == 1, "one request suffices"
    words = case.command().partition("--without ")[2].split()
    assert Case(case.seed, case.events, Cut.parse(words)).run() == report


def test_the_program_says_in_one_line_how_it_went() -> None:
    command = [sys.executable, PROGRAM, "--seeds", "2", "--first", "40", "--events", "100", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    total = json.loads(done.stdout.splitlines()[-1])
    assert total["seeds"] == 2 and total["failed"] == [] and total["events"] > 100
