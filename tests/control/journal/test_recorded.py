"""Journals of earlier runs are planned again: whoever changes the scheduling without meaning to is told here.

After a change that is meant: python tests/support/record_journals.py
"""

from pathlib import Path

import pytest
from evenflow.control.core.bounds import ADMISSIONS, POLICIES
from evenflow.control.journal.replay import Journal, replay

FILES = sorted((Path(__file__).parent / "recorded").glob("*.journal"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_plans_are_those_that_were_recorded(path: Path) -> None:
    done = replay(Journal(path))
    lines = "\n".join(done.problem)
    assert not done.problem, f"{lines}\nIf that is meant: python tests/support/record_journals.py"
    assert done.plans >= 90 and done.note == ""


def test_every_policy_and_order_is_among_them() -> None:
    limits = [Journal(path).limits for path in FILES]
    assert {found.policy for found in limits} == set(POLICIES)
    assert {found.admission for found in limits} == set(ADMISSIONS)
    assert any(found.slo is not None and found.policy == "stall-free" for found in limits)
    assert {Journal(path).opening.ids for path in FILES} == {True, False}
