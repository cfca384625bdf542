"""Random schedules over the core: any order of arrivals, aborts, results, deaths and restarts, on small pools.

After every step the integrity check runs (inside ``InProcess``). At the end every request has finished, with the
tokens of an undisturbed run and each of their log-probabilities once, and nothing is held. ``EVENFLOW_SCHEDULES``
sets how many schedules are tried.
"""

import os
from collections.abc import Iterator

import pytest
from evenflow.control.core.events import Limits
from evenflow.control.wire import Sampling, digest
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from inprocess import InProcess
from shadow_server import logprob_of

VOCAB = 40
SCHEDULES = int(os.environ.get("EVENFLOW_SCHEDULES", "500"))


class Schedules(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.down: list[int] = []
        self.wanted: dict[int, tuple[int, list[int], str]] = {}
        self.prompts: dict[int, list[int]] = {}
        self.reports: dict[int, tuple[Sampling, int]] = {}
        self.aborted: set[int] = set()
        self.crashes = 0

    @initialize(
        stages=st.integers(1, 4),
        replicas=st.sampled_from([1, 1, 2]),
        budget=st.sampled_from([1, 3, 7, 16, 33, 64]),
        block_size=st.sampled_from([4, 8, 16]),
        blocks=st.sampled_from([12, 16, 24, 60]),
        seqs=st.sampled_from([2, 4, 8, 16]),
        extra_slots=st.integers(0, 8),
        caching=st.booleans(),
        tile=st.sampled_from([0, 0, 8, 16]),
        share=st.sampled_from([0.0, 0.25, 0.5]),
        overtakes=st.sampled_from([0, 2, 32]),
    )
    def build(
        self,
        stages: int,
        replicas: int,
        budget: int,
        block_size: int,
        blocks: int,
        seqs: int,
        extra_slots: int,
        caching: bool,
        tile: int,
        share: float,
        overtakes: int,
    ) -> None:
        self.length = min(160, blocks * block_size)
        limits = Limits(
            token_budget=budget,
            max_num_seqs=seqs,
            max_model_len=self.length,
            block_size=block_size,
            prefix_caching=caching,
            tile=tile,
            share=share,
            overtakes=overtakes,
        )
        self.budget = budget

        def runner(stage: int, count: int) -> ShadowRunner:
            return ShadowRunner(
                stage, count, block_size=block_size, num_blocks=blocks, vocab_size=VOCAB, max_model_len=self.length
            )

        self.server = InProcess(limits, runner, stages=stages, replicas=replicas, num_slots=seqs + extra_slots)

    @rule(
        data=st.data(),
        owner=st.integers(0, 2),
        seeded=st.booleans(),
        stops=st.booleans(),
        again=st.booleans(),
        logprobs=st.sampled_from([-1, -1, 0, 2]),
        prompt_logprobs=st.sampled_from([-1, -1, -1, 0, 1]),
        leader=st.none() | st.integers(0, 4),
    )
    def submit(
        self,
        data: st.DataObject,
        owner: int,
        seeded: bool,
        stops: bool,
        again: bool,
        logprobs: int,
        prompt_logprobs: int,
        leader: int | None,
    ) -> None:
        key = len(self.wanted)
        longest = min(self.length - 2, max(8, 3 * self.budget))
        size = data.draw(st.integers(1, longest))
        shared = data.draw(st.integers(0, size)) if again else 0
        fresh = data.draw(st.integers(1, 1 << 30))
        prompt = [(7 * i + 3) % VOCAB for i in range(shared)]
        prompt += [(fresh >> i % 24) * (i + 1) % VOCAB for i in range(size - shared)]
        if leader is not None:
            # Mostly a sibling, as for n > 1; now and then a stranger, or somebody who has ended.
            leader = key - 1 - leader
            if leader in self.prompts and fresh % 8:
                owner, prompt = self.wanted[leader][0], self.prompts[leader]
                size = len(prompt)
        count = data.draw(st.integers(1, min(self.length - size, 30)))
        sampling = Sampling(1.0 if seeded else 0.0, 0, 1.0, fresh, logprobs=logprobs, prompt_logprobs=prompt_logprobs)
        stop_ids = (data.draw(st.integers(0, VOCAB - 1)),) if stops else ()
        min_tokens = data.draw(st.integers(0, 4)) if stops else 0
        wanted = shadow_tokens(
            prompt, count, sampling, vocab_size=VOCAB, stop_ids=stop_ids, min_len=size + min_tokens
        )
        received = wanted[: data.draw(st.integers(0, len(wanted) - 1))] if again else []
        ends = "stop" if wanted[-1] in stop_ids and len(wanted) >= min_tokens else "length"
        self.wanted[key] = (owner, wanted, ends)
        self.prompts[key] = prompt
        self.reports[key] = (sampling, size + len(received))
        self.server.submit(
            key,
            prompt,
            count,
            owner=owner,
            received=received,
            sampling=sampling,
            stop_ids=stop_ids,
            min_tokens=min_tokens,
            leader=None if leader is None or leader < 0 else leader,
        )

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Also of requests that have ended, and twice."""
        key = data.draw(st.integers(0, len(self.wanted) - 1))
        self.server.abort(key, self.wanted[key][0])
        self.aborted.add(key)

    @rule(data=st.data(), steps=st.integers(1, 40))
    def advance(self, data: st.DataObject, steps: int) -> None:
        seed = data.draw(st.integers(0, 1 << 30))
        for _ in self.server.walk(seed, steps):
            pass

    @precondition(lambda self: self.crashes < 2 and len(self.down) < len(self.server.replicas))
    @rule(replica=st.integers(0, 1), keep_results=st.booleans())
    def crash(self, replica: int, keep_results: bool) -> None:
        """Twice at most, so that no request can be suspected of killing workers."""
        replica %= len(self.server.replicas)
        if replica not in self.down:
            self.server.crash(replica, keep_results)
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
        for key, (owner, wanted, ends) in self.wanted.items():
            got, reason = self.server.tokens(key, owner), self.server.reason(key, owner)
            if reason == "abort":
                assert key in self.aborted and got == wanted[: len(got)]
            else:
                assert (got, reason) == (wanted, ends)
            self.check_logprobs(key, owner, got, reason == "abort")
        self.server.assert_idle()

    def check_logprobs(self, key: int, owner: int, got: list[int], aborted: bool) -> None:
        """Each token that came has its own, with its value; so has each prompt token, unless an abort cut it off."""
        (sampling, received), prompt = self.reports[key], self.prompts[key]
        tokens = prompt + got
        expected = {}
        if sampling.prompt_logprobs >= 0:
            expected = {i: logprob_of(prompt, i, sampling.prompt_logprobs, VOCAB) for i in range(1, len(prompt))}
        told = self.server.logprobs_of(key, owner)
        if aborted and not got[received - len(prompt) :]:
            expected = {i: row for i, row in expected.items() if i in told}
        if sampling.logprobs >= 0:
            expected |= {i: logprob_of(tokens, i, sampling.logprobs, VOCAB) for i in range(received, len(tokens))}
        assert told == expected, f"request {key}"


@pytest.fixture(autouse=True, scope="module")
def every_step_is_audited() -> Iterator[None]:
    """And every slot, as in no server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digest, "AUDIT_EVERY", 1)
        patch.setattr(digest, "AUDIT_STRIDE", 1)
        yield


TestSchedules = Schedules.TestCase
TestSchedules.settings = settings(
    max_examples=SCHEDULES,
    stateful_step_count=25,
    deadline=None,
    derandomize="EVENFLOW_SCHEDULES" not in os.environ,
    suppress_health_check=list(HealthCheck),
)
