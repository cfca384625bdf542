"""Chunks aligned with shared prefixes (``Limits.await_prefix``)."""

from __future__ import annotations

import pytest
from evenflow.control.core.engine import Engine
from evenflow.control.core.events import Aborted, Effect, Event, Limits, ReplicaUp, Returned, SendPlan, Submitted
from evenflow.control.core.integrity import check_integrity
from evenflow.control.wire import Result, Submit
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import u32

SLOTS, BLOCK = 16, 4


class Run:
    def __init__(self, waits: bool, budget: int = 16) -> None:
        limits = Limits(
            token_budget=budget, max_num_seqs=8, max_model_len=256, block_size=BLOCK, share=0.0, await_prefix=waits
        )
        self.engine = Engine(limits)
        self.plans: list[SendPlan] = []
        self.computed = 0  #: tokens of prompts, by chunks
        self.iterations = 0
        self.step(ReplicaUp(0, 1, 1, 200, SLOTS))

    def step(self, event: Event) -> None:
        effects: list[Effect] = self.engine.step(event, 0.0)
        check_integrity(self.engine)
        for effect in effects:
            if isinstance(effect, SendPlan):
                self.plans.append(effect)
                self.computed += effect.tokens - effect.decodes
                self.iterations += 1

    def submit(self, key: int, tokens: list[int], output: int = 2) -> None:
        self.step(Submitted(0, Submit(key, f"r{key}", u32(tokens), len(tokens), output)))

    def answer(self) -> bool:
        if not self.plans:
            return False
        plan = self.plans.pop(0).plan
        ids = bytes(4 * SLOTS)
        self.step(Returned(0, Result(plan.epoch, plan.step, plan.lane, 0, 0, 1, 0, 0, ids)))
        return True

    def drain(self) -> None:
        while self.answer():
            pass
        assert not self.engine.requests


SHARED = list(range(1, 41))


@pytest.mark.parametrize(("waits", "computed"), [(False, 88), (True, 48)])
def test_two_that_come_together_compute_what_they_share_once(waits: bool, computed: int) -> None:
    """40 tokens in common and 4 of each one's own, and both fit one iteration."""
    run = Run(waits, 128)
    run.step(Submitted(0, Submit(9, "before", u32([99] * 30), 30, 2)))
    run.submit(0, [*SHARED, 50, 51, 52, 53])
    run.submit(1, [*SHARED, 60, 61, 62, 63])
    run.drain()
    assert run.computed - 30 == computed


def test_who_has_nothing_in_common_passes_who_waits() -> None:
    run = Run(True)
    run.submit(0, [*SHARED, 50])
    run.submit(1, [*SHARED, 60])
    run.submit(2, [70, 71, 72])
    waiting = run.engine.replicas[0].waiting
    while any(seq.key == 2 for seq in waiting):
        assert run.answer()
    assert [seq.key for seq in waiting] in ([1], [])
    run.drain()


def test_who_waits_goes_on_when_the_other_is_aborted() -> None:
    run = Run(True)
    run.submit(0, SHARED * 4)
    run.submit(1, [*SHARED, 60])
    run.step(Aborted(0, 0))
    run.drain()


@settings(max_examples=80, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 60), st.integers(1, 30), st.booleans()), min_size=2, max_size=10))
def test_everybody_ends_and_no_more_is_computed_than_without_waiting(load: list[tuple[int, int, bool]]) -> None:
    counts: list[int] = []
    for waits in (False, True):
        run = Run(waits)
        for key, (shared, own, answers) in enumerate(load):
            run.submit(key, [*(SHARED * 2)[:shared], *[100 + key] * own])
            if answers:
                run.answer()
        run.drain()
        counts.append(run.computed)
    assert counts[1] <= counts[0]
