"""Token times against a count of every single token, and iterations' records, on whole servers in one process."""

import random
from collections import Counter
from collections.abc import Callable

import pytest
from evenflow.control.core.bounds import iteration_tokens
from evenflow.control.core.events import Delivered, Event, Rejected, ReplicaLost, Returned, SendPlan, Submitted
from evenflow.control.latency import slots_of
from evenflow.control.status import request_rows
from evenflow.control.telemetry import Telemetry
from evenflow.control.wire import Result, Submit
from inprocess import InProcess
from shadow_server import prompt, scrambled, shadow_server


class Exact:
    """Takes a histogram's place and keeps all values."""

    def __init__(self) -> None:
        self.values: Counter[float] = Counter()

    def add(self, value: float, weight: int, now: float) -> None:
        self.values[value] += weight


class Watched:
    """A server whose effects are reported to a ``Telemetry`` as the control process does it, and whose tokens are
    counted one by one beside it."""

    def __init__(self, server: InProcess) -> None:
        self.server = server
        self.telemetry = Telemetry()
        self.ttft, self.tbt = Exact(), Exact()
        self.telemetry.times.ttft = self.ttft  # type: ignore[assignment]
        self.telemetry.times.tbt = self.tbt  # type: ignore[assignment]
        self.expected_ttft: Counter[float] = Counter()
        self.expected_tbt: Counter[float] = Counter()
        self._last: dict[tuple[int, int], float] = {}
        self._seen: Counter[tuple[int, int]] = Counter()
        self._inner, self._outer = server.decide, server.step
        server.decide = self._engine_step
        server.step = self._step  # type: ignore[method-assign]

    def _engine_step(self, event: Event, now: float) -> list:
        telemetry = self.telemetry
        if isinstance(event, Submitted):
            telemetry.submitted(event, now)
            if not event.submit.tokens[4 * event.submit.prompt_len :]:
                self._last.setdefault((event.owner, event.submit.key), now)
        effects = self._inner(event, now)
        for effect in effects:
            if isinstance(effect, SendPlan):
                telemetry.planned(effect, self.server.engine.replicas[effect.replica], now, now)
            elif isinstance(effect, Delivered):
                lane = event.result.lane if isinstance(event, Returned) else 0
                telemetry.delivered(effect, lane, now)
            elif isinstance(effect, Rejected):
                telemetry.rejected(effect)
        if isinstance(event, ReplicaLost):
            telemetry.epoch_over(event.replica)
        return effects

    def _step(self, event: Event) -> None:
        self._outer(event)
        now = self.server.now
        for owner, client in self.server.clients.items():
            for key, tokens in client.tokens.items():
                place = (owner, key)
                for count in range(self._seen[place], len(tokens)):
                    gaps = self.expected_tbt if count else self.expected_ttft
                    gaps[now - self._last[place]] += 1
                    self._last[place] = now
                self._seen[place] = len(tokens)

    def check(self) -> None:
        assert self.ttft.values == self.expected_ttft
        assert self.tbt.values == self.expected_tbt
        tokens = sum(len(t) for client in self.server.clients.values() for t in client.tokens.values())
        assert self.telemetry.times.tokens == tokens
        assert not self.telemetry.times._arrived and not self.telemetry.times._paused


@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("policy", "seed"),
    [*[("stall-free", seed) for seed in range(4)], ("prefill-first", 0), ("prefill-first", 1), ("chunked-only", 0)],
)
def test_token_times_are_those_of_every_single_token(stages: int, policy: str, seed: int) -> None:
    """With preemptions, stops, aborts, a crash, and sequences that move between lanes."""
    draw = random.Random(seed * 10 + stages)
    budget = iteration_tokens(policy, 48, 96, 12)
    server = shadow_server(budget=budget, blocks=24, block_size=4, stages=stages, seqs=12, check=False, policy=policy)
    watched = Watched(server)
    choose = scrambled(seed + 1)
    waiting: list[Callable[[], None]] = [
        lambda key=key, owner=key % 3: server.submit(
            key, prompt(draw.randrange(1, 40), seed=key), draw.randrange(1, 30), owner=owner
        )
        for key in range(24)
    ]
    waiting[12:12] = [lambda: server.abort(3, owner=0), lambda: server.abort(7, owner=1)]
    if seed % 2:
        waiting[16:16] = [lambda: server.crash(0), lambda: server.bring_up(0)]
    for happen in waiting:
        happen()
        server.run(choose, most=10**6) if draw.random() < 0.1 else _some(server, choose, draw.randrange(12))
    server.run(choose)
    watched.check()
    engine = server.engine
    assert stages > 1 or engine.counters["preemptions"] + engine.replicas[0].preemptions > 0
    ends = watched.telemetry.ended
    assert sum(ends.values()) == 24 and ends["abort"] <= 2


def _some(server: InProcess, choose: Callable[[int], int], count: int) -> None:
    for _ in range(count):
        actions = server.actions()
        if not actions:
            return
        action, replica, stage = actions[choose(len(actions))]
        action(replica, stage)


def test_a_refused_request_leaves_the_running_one_its_arrival() -> None:
    server = shadow_server()
    watched = Watched(server)
    server.submit(1, prompt(8), 4)
    server.step(Submitted(0, Submit(1, "the key is taken", bytes(32), 8, 4)))
    server.step(Submitted(0, Submit(2, "longer than its tokens", bytes(32), 99, 4)))
    server.run()
    watched.check()
    assert watched.telemetry.refused == {"invalid": 2}


def test_records_say_what_was_in_each_iteration() -> None:
    server = shadow_server(budget=16, stages=2)
    watched = Watched(server)
    telemetry = watched.telemetry
    server.submit(1, prompt(24), 6)
    telemetry.watch(True)  # the plans that are out are not recorded
    made = len(server.plans)
    server.submit(2, prompt(40, seed=2), 6)
    returned: list[tuple[int, Result]] = []
    inner = server.replicas[0].run_stage

    def run_stage(stage: int) -> Result | None:
        result = inner(stage)
        if result is not None:
            returned.append((stage, result))
        return result

    server.replicas[0].run_stage = run_stage  # type: ignore[method-assign]
    server.run()
    records = [
        record
        for stage, result in returned
        if (record := telemetry.returned(0, stage, result, 5.0 + result.step)) is not None
    ]
    plans = {plan.plan.step: plan for plan in server.plans[made:]}
    assert [record.step for record in records] == list(plans) and len(records) > 5
    for record in records:
        plan = plans[record.step]
        assert (record.tokens, record.decodes) == (plan.tokens, plan.decodes)
        assert record.chunk_tokens == plan.tokens - plan.decodes and record.tokens <= record.budget == 16
        assert len(record.stages) == 2 and record.returned_us == (5 + record.step) * 10**6
        assert record.blocks_used + record.blocks_cached + record.blocks_free == 512
        assert record.chunks == len(plan.plan.chunk_slots) // 2
    assert records[0].queued + records[0].running == 2
    assert telemetry.decode_tokens + telemetry.chunk_tokens == sum(plan.tokens for plan in server.plans)
    assert sum(telemetry.iterations.values()) == len(server.plans)
    telemetry.watch(False)
    assert telemetry.returned(0, 0, returned[0][1], 1.0) is None


def test_request_rows_follow_a_request_from_queue_to_output() -> None:
    server = shadow_server(budget=16, seqs=1)
    watched = Watched(server)

    def rows(most: int = 10):
        return request_rows(server.engine, watched.telemetry, most, server.now + 2.5)

    assert rows() == []
    server.submit(1, prompt(40), 8)
    server.submit(2, prompt(5, seed=2), 3)
    first, second = rows()
    assert (first.request, first.phase, first.prompt, first.output, first.limit) == ("r1", "prefill", 40, 0, 8)
    assert (second.request, second.phase, second.computed, second.replica) == ("r2", "waiting", 0, 0)
    assert first.age_ms == 3500 and rows(1) == [first]
    while len(server.tokens(1)) < 3:
        _some(server, lambda n: n - 1, 1)
    first, second = rows()
    assert (first.phase, first.computed, first.output) == ("decode", 40, 3) and second.phase == "waiting"
    server.run()
    assert rows() == []


def test_slots_of() -> None:
    assert slots_of(0) == [] and slots_of(0b1001_0110) == [1, 2, 4, 7] and slots_of(1 << 900) == [900]
