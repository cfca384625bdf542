"""When the launcher believes that a worker which control has not heard of hangs."""

import pytest
from evenflow.cli.supervisor import LOAD_MARGIN, LONGEST_LOAD, overdue


@pytest.mark.parametrize(
    ("age", "loaded_in", "hangs"),
    [
        (1e6, None, False),  # nobody has ever been ready: it may still load
        (LONGEST_LOAD, 1.0, False),
        (LONGEST_LOAD + 1, 1.0, True),
        (LOAD_MARGIN * 300, 300.0, False),
        (LOAD_MARGIN * 300 + 1, 300.0, True),
    ],
)
def test_a_worker_has_longer_than_loading_took(age: float, loaded_in: float | None, hangs: bool) -> None:
    assert overdue(age, loaded_in) is hangs
