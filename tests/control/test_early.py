"""Requests that come before there are workers."""

from array import array

from evenflow.control.core.events import Limits
from evenflow.control.early import EarlyRequests
from evenflow.control.wire import Submit


def submit(key: int, *, tokens: int = 4, deadline_ms: int = 0) -> Submit:
    return Submit(key, f"r{key}", array("I", range(tokens)).tobytes(), tokens, 8, deadline_ms=deadline_ms)


def test_they_are_taken_in_their_order_with_what_is_left_of_their_deadlines() -> None:
    early = EarlyRequests(Limits(token_budget=16))
    for owner, key, deadline_ms, now in ((1, 0, 0, 5.0), (2, 0, 3000, 5.5), (1, 1, 1000, 6.0)):
        assert early.add(owner, submit(key, deadline_ms=deadline_ms), now) is None
    taken = early.take(7.25)
    assert [(owner, s.key, s.deadline_ms) for owner, s in taken] == [(1, 0, 0), (2, 0, 1250), (1, 1, 1)]
    assert not early.take(8.0)


def test_one_whose_deadline_passes_is_told_so_and_waits_no_longer() -> None:
    early = EarlyRequests(Limits(token_budget=16))
    early.add(1, submit(0, deadline_ms=500), 1.0)
    early.add(1, submit(1), 1.0)
    assert not early.overdue(1.49)
    ((owner, refused),) = early.overdue(1.5)
    assert (owner, refused.key, refused.code, refused.field) == (1, 0, "deadline", "deadline_ms")
    assert not early.overdue(9.0) and [s.key for _, s in early.take(9.0)] == [1]


def test_no_more_wait_than_the_queue_may_hold() -> None:
    early = EarlyRequests(Limits(token_budget=16, max_queued=3, max_queued_tokens=100))
    assert early.add(1, submit(0, tokens=200), 0.0) is None, "one alone may be as long as it likes"
    refused = early.add(1, submit(1), 0.0)
    assert refused is not None and (refused.code, refused.field) == ("overloaded", "max_queued_tokens")
    early.drop(1, 0)
    assert all(early.add(2, submit(key), 0.0) is None for key in range(3))
    refused = early.add(1, submit(4), 0.0)
    assert refused is not None and (refused.code, refused.field) == ("overloaded", "max_queued")


def test_aborted_ones_and_those_of_lost_clients_are_forgotten() -> None:
    early = EarlyRequests(Limits(token_budget=16))
    for owner in (1, 2):
        for key in range(3):
            early.add(owner, submit(key), 0.0)
    early.drop(1, 1)
    assert (early.count(1), early.count(2)) == (2, 3)
    early.drop(2)
    assert (early.count(1), early.count(2)) == (2, 0)
    assert [(owner, s.key) for owner, s in early.take(0.0)] == [(1, 0), (1, 2)]
