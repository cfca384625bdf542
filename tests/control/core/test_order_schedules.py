"""Random schedules under each admission order, on small pools: tenants, priorities and deadlines, aborts and deaths.

After every step the integrity check runs (inside ``InProcess``). At the end every request has finished with the
tokens of an undisturbed run, unless it was aborted or its time had run out, and nothing is held.
"""

from typing import Any, ClassVar

import pytest
from evenflow.control.core.bounds import ADMISSIONS
from evenflow.control.core.events import Due, Limits
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from inprocess import InProcess

VOCAB = 40
LENGTH = 96


class Orders(RuleBasedStateMachine):
    admission: ClassVar[str]

    @initialize(
        stages=st.integers(1, 3),
        replicas=st.sampled_from([1, 1, 2]),
        budget=st.sampled_from([3, 16, 33]),
        blocks=st.sampled_from([12, 16, 40]),
        seqs=st.sampled_from([2, 4, 8]),
        caching=st.booleans(),
        queue_timeout=st.sampled_from([0.0, 0.0, 40.0]),
    )
    def build(self, stages: int, replicas: int, budget: int, blocks: int, seqs: int, **limits: Any) -> None:
        caching, queue_timeout = limits["caching"], limits["queue_timeout"]

        def runner(stage: int, count: int) -> ShadowRunner:
            return ShadowRunner(stage, count, block_size=8, num_blocks=blocks, vocab_size=VOCAB, max_model_len=LENGTH)

        self.server = InProcess(
            Limits(
                token_budget=budget,
                max_num_seqs=seqs,
                max_model_len=LENGTH,
                block_size=8,
                prefix_caching=caching,
                admission=self.admission,
                patience=20.0,
                tenant_weights=(("a", 3.0), ("b", 0.5)),
                queue_timeout=queue_timeout,
            ),
            runner,
            stages=stages,
            replicas=replicas,
            num_slots=seqs + 4,
        )
        self.server.pace = 0.1
        self.down: list[int] = []
        self.crashes = 0
        self.wanted: dict[int, tuple[int, list[int]]] = {}
        self.excused: dict[int, set[str]] = {}  #: by request: how else it may end

    @rule(
        data=st.data(),
        owner=st.integers(0, 1),
        size=st.integers(1, 60),
        count=st.integers(1, 30),
        tenant=st.sampled_from(["", "", "a", "b", "c"]),
        priority=st.integers(-2, 2),
        deadline_ms=st.sampled_from([0, 0, 0, 50, 2_000, 60_000]),
        shared=st.booleans(),
        times=st.integers(1, 4),
    )
    def submit(
        self,
        data: st.DataObject,
        owner: int,
        size: int,
        count: int,
        tenant: str,
        shared: bool,
        times: int,
        **how: int,
    ) -> None:
        priority = how["priority"] if self.admission == "priority" else 0
        deadline_ms = how["deadline_ms"]
        for _ in range(times):
            key = len(self.wanted)
            fresh = 3 if shared else data.draw(st.integers(1, 1 << 20))
            prompt = [(fresh >> i % 12) * (i + 1) % VOCAB for i in range(size)]
            self.wanted[key] = (owner, shadow_tokens(prompt, min(count, LENGTH - size), vocab_size=VOCAB))
            self.excused[key] = {"deadline"} if deadline_ms else set()
            if self.server.limits.queue_timeout:
                self.excused[key].add("queue_timeout")
            self.server.submit(
                key, prompt, count, owner=owner, tenant=tenant, priority=priority, deadline_ms=deadline_ms
            )

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, len(self.wanted) - 1))
        self.server.abort(key, self.wanted[key][0])
        self.excused[key].add("abort")

    @rule(seed=st.integers(0, 1 << 30), steps=st.integers(1, 40))
    def advance(self, seed: int, steps: int) -> None:
        for _ in self.server.walk(seed, steps):
            pass

    @rule()
    def wake(self) -> None:
        """The next request that ends by time does, though nothing else happens."""
        at = self.server.engine.expiry.next()
        if at < float("inf"):
            assert self.server.wake_at == at
            self.server.now = max(self.server.now, at)
            self.server.step(Due())

    @precondition(lambda self: self.crashes < 2 and len(self.down) < len(self.server.replicas))
    @rule(replica=st.integers(0, 1))
    def crash(self, replica: int) -> None:
        replica %= len(self.server.replicas)
        if replica not in self.down:
            self.server.crash(replica)
            self.down.append(replica)
            self.crashes += 1

    @precondition(lambda self: self.down)
    @rule()
    def bring_up(self) -> None:
        self.server.bring_up(self.down.pop())

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        while self.down:
            self.server.bring_up(self.down.pop())
        self.server.run()
        assert not self.server.rejected
        for key, (owner, wanted) in self.wanted.items():
            got, reason = self.server.tokens(key, owner), self.server.reason(key, owner)
            if reason in self.excused[key]:
                assert got == wanted[: len(got)]
            else:
                assert (got, reason) == (wanted, "length")
        self.server.assert_idle()
        ledger = self.server.engine.ledger
        assert ledger is None or not any(a.sequences or a.waiting or a.decoding for a in ledger.accounts.values())


@pytest.mark.parametrize("admission", ADMISSIONS)
def test_random_schedules(admission: str) -> None:
    machine = type(f"Orders{admission}", (Orders,), {"admission": admission})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=20,
            stateful_step_count=20,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )
