"""Random schedules over every policy but the default one, which ``test_schedules`` has: any order of arrivals,
aborts, results, deaths and restarts, on small pools.

After every step the integrity check runs (inside ``InProcess``), and what the policy promises is checked of every
plan. At the end every request has finished with the tokens of an undisturbed run, and nothing is held.
``EVENFLOW_SCHEDULES`` sets how many schedules are tried of each policy.
"""

import os
from array import array

import pytest
from evenflow.control.core.bounds import BESIDE_DECODES, POLICIES, WHOLE_PROMPTS, iteration_tokens
from evenflow.control.core.events import Limits, SendPlan
from evenflow.control.wire import Sampling
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from inprocess import InProcess

VOCAB = 40
SCHEDULES = int(os.environ.get("EVENFLOW_SCHEDULES", "25"))


class Book:
    """What plans have said of an epoch: enough to hold the next one against the policy's definition."""

    def __init__(self) -> None:
        self.epoch = 0

    def check(self, policy: str, sent: SendPlan) -> None:
        plan = sent.plan
        if plan.epoch != self.epoch:
            self.epoch = plan.epoch
            self.rest: dict[int, int] = {}  #: tokens of a slot's prompt that no chunk had
            self.batches: dict[int, set[int]] = {}  #: the slots of a lane's batch, under request-level
            self.decoded: set[int] = set()  #: lanes whose batch has begun to decode
        for slot in array("H", plan.released):
            del self.rest[slot]
            for batch in self.batches.values():
                batch.discard(slot)
        for register in sent.registers:
            self.rest[register.slot] = (len(register.tokens) >> 2) - register.computed
        chunks = dict(zip(array("H", plan.chunk_slots), array("I", plan.chunk_tokens), strict=True))
        bits = int.from_bytes(plan.decodes, "little")
        decodes = {slot for slot in range(bits.bit_length()) if bits >> slot & 1}
        for slot, tokens in chunks.items():
            assert tokens == self.rest[slot] or policy not in WHOLE_PROMPTS, "a prompt is cut"
            self.rest[slot] -= tokens
        assert not (chunks and decodes) or policy in BESIDE_DECODES, "chunks beside decodes"
        assert not plan.grow_slots or policy not in ("hybrid", "request-level"), "what was reserved has to grow"
        if policy == "request-level":
            self._batch(plan.lane, set(chunks), decodes)

    def _batch(self, lane: int, chunks: set[int], decodes: set[int]) -> None:
        batch = self.batches.setdefault(lane, set())
        if chunks:
            assert not batch or lane not in self.decoded, "admitted to a batch that has not ended"
            batch |= chunks
            self.decoded.discard(lane)
        else:
            assert decodes == batch, "a request of the batch does not run"
            self.decoded.add(lane)


class Schedules(RuleBasedStateMachine):
    """The schedules of one policy."""

    policy = ""

    @initialize(
        stages=st.integers(1, 4),
        budget=st.sampled_from([1, 7, 16, 48]),
        block_size=st.sampled_from([4, 8]),
        blocks=st.sampled_from([12, 20, 60]),
        seqs=st.sampled_from([2, 5, 12]),
        caching=st.booleans(),
    )
    def build(self, stages: int, budget: int, block_size: int, blocks: int, seqs: int, caching: bool) -> None:
        self.length = min(100, blocks * block_size)
        limits = Limits(
            token_budget=iteration_tokens(self.policy, budget, self.length, seqs),
            max_num_seqs=seqs,
            max_model_len=self.length,
            block_size=block_size,
            prefix_caching=caching,
            policy=self.policy,
        )

        def runner(stage: int, count: int) -> ShadowRunner:
            return ShadowRunner(
                stage, count, block_size=block_size, num_blocks=blocks, vocab_size=VOCAB, max_model_len=self.length
            )

        self.server = InProcess(limits, runner, stages=stages, num_slots=seqs + 4)
        self.wanted: dict[int, tuple[list[int], str]] = {}
        self.aborted: set[int] = set()
        self.crashes = 0
        self.seen = 0
        self.book = Book()

    @rule(data=st.data(), fresh=st.integers(1, 1 << 30), stops=st.booleans(), again=st.booleans())
    def submit(self, data: st.DataObject, fresh: int, stops: bool, again: bool) -> None:
        key = len(self.wanted)
        size = data.draw(st.integers(1, min(self.length - 2, 60)))
        shared = data.draw(st.integers(0, size)) if again else 0
        prompt = [(7 * i + 3) % VOCAB for i in range(shared)]
        prompt += [(fresh >> i % 24) * (i + 1) % VOCAB for i in range(size - shared)]
        count = data.draw(st.integers(1, min(self.length - size, 30)))
        sampling = Sampling(1.0 if fresh % 2 else 0.0, 0, 1.0, fresh)
        stop_ids = (data.draw(st.integers(0, VOCAB - 1)),) if stops else ()
        wanted = shadow_tokens(prompt, count, sampling, vocab_size=VOCAB, stop_ids=stop_ids)
        self.wanted[key] = wanted, "stop" if wanted[-1] in stop_ids else "length"
        self.server.submit(key, prompt, count, sampling=sampling, stop_ids=stop_ids)
        self.watch()

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.integers(0, len(self.wanted) - 1))
        self.server.abort(key)
        self.aborted.add(key)
        self.watch()

    @rule(seed=st.integers(0, 1 << 30), steps=st.integers(1, 40))
    def advance(self, seed: int, steps: int) -> None:
        for _ in self.server.walk(seed, steps):
            self.watch()

    @precondition(lambda self: self.crashes < 2)
    @rule(keep_results=st.booleans())
    def crash(self, keep_results: bool) -> None:
        """Twice at most, so that no request can be suspected of killing workers."""
        self.server.crash(0, keep_results)
        self.server.bring_up(0)
        self.crashes += 1
        self.watch()

    def watch(self) -> None:
        """What the policy promises of each plan that was made since."""
        for sent in self.server.plans[self.seen :]:
            self.book.check(self.policy, sent)
        self.seen = len(self.server.plans)
        if self.policy in ("hybrid", "request-level"):
            assert all(replica.preemptions == 0 for replica in self.server.engine.replicas.values())

    def teardown(self) -> None:
        if not hasattr(self, "server"):
            return
        self.server.run()
        self.watch()
        assert not self.server.rejected
        for key, (wanted, ends) in self.wanted.items():
            got, reason = self.server.tokens(key), self.server.reason(key)
            if reason == "abort":
                assert key in self.aborted and got == wanted[: len(got)]
            else:
                assert (got, reason) == (wanted, ends)
        self.server.assert_idle()


@pytest.mark.parametrize("policy", [policy for policy in POLICIES if policy != "stall-free"])
def test_schedules(policy: str) -> None:
    class Machine(Schedules):
        pass

    Machine.policy = policy
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=SCHEDULES,
            stateful_step_count=20,
            deadline=None,
            derandomize="EVENFLOW_SCHEDULES" not in os.environ,
            suppress_health_check=list(HealthCheck),
        ),
    )
