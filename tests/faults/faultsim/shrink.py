"""Makes a failing seed smaller: fewer events, then fewer faults and requests, as long as it still fails."""

from collections.abc import Callable
from dataclasses import dataclass

from .clients import Ask
from .scenario import Cut, draw
from .world import Report, run

WHOLE = Cut()


@dataclass(frozen=True, slots=True)
class Case:
    """All that a run depends on."""

    seed: int
    events: int
    cut: Cut = WHOLE

    def command(self) -> str:
        """What repeats it."""
        leaving = f" --without {self.cut}" if str(self.cut) else ""
        return f".venv/bin/python tests/faults --seed {self.seed} --events {self.events}{leaving}"

    def run(self) -> Report:
        return run(self.seed, self.events, self.cut)


def shrink(case: Case, say: Callable[[str], object] = lambda _: None) -> tuple[Case, Report]:
    """The smallest failing case found. Not the same failure necessarily: any that must not be."""
    report = case.run()
    if report.problem is None:
        raise ValueError("this seed does not fail")

    def fails(other: Case) -> bool:
        nonlocal case, report
        found = other.run()
        if found.problem is None:
            return False
        case, report = other, found
        left = f"{other.events} events, {found.requests} requests, without {other.cut or 'nothing'}"
        say(f"still fails: {left}: {found.problem[:200]}")
        return True

    low, high = 0, min(case.events, report.events)
    while low + 1 < high:
        middle = (low + high) // 2
        if fails(Case(case.seed, middle, case.cut)):
            high = middle
        else:
            low = middle
    for kind in ("f", "r"):
        # Halves, quarters … and single ones are left out in turn.
        size = len(_left(case, kind))
        while size:
            for start in range(0, len(_left(case, kind)), size):
                some = _left(case, kind)[start : start + size]
                if some:
                    fails(Case(case.seed, case.events, _more(case.cut, kind, some)))
            size //= 2
    return case, report


def _left(case: Case, kind: str) -> list[int]:
    """The numbers of the requests (``r``) or faults (``f``) that come."""
    scenario = draw(case.seed, case.events).without(case.cut)
    return [what.number for _, what in scenario.happenings if isinstance(what, Ask) == (kind == "r")]


def _more(cut: Cut, kind: str, numbers: list[int]) -> Cut:
    if kind == "r":
        return Cut(cut.requests | set(numbers), cut.faults)
    return Cut(cut.requests, cut.faults | set(numbers))
