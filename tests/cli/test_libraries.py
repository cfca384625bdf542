"""The environment of processes that compute."""

import pytest
from evenflow.cli.libraries import library_env


def test_idle_threads_of_openmp_soon_leave_their_core() -> None:
    added = library_env(2, {"PATH": "/bin"})
    assert added["OMP_NUM_THREADS"] == "2"
    assert 0 < int(added["GOMP_SPINCOUNT"]) < 100_000


@pytest.mark.parametrize("said", [{"OMP_WAIT_POLICY": "active"}, {"GOMP_SPINCOUNT": "7"}])
def test_what_the_user_says_of_waiting_counts(said: dict[str, str]) -> None:
    assert library_env(1, said) == {"OMP_NUM_THREADS": "1"}
