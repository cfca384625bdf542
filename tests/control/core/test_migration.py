"""Disaggregated serving in the decision core: prompts on some replicas, decodes on others, blocks in between."""

from __future__ import annotations

from evenflow.control.core.engine import Engine
from evenflow.control.core.events import (
    Aborted,
    Delivered,
    Effect,
    Event,
    Limits,
    Move,
    Moved,
    ReplicaLost,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
)
from evenflow.control.core.integrity import check_integrity
from evenflow.control.wire import Result, Submit
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import u32

SLOTS = 16


class Cluster:
    """An engine whose plans and moves are done when a test says so."""

    def __init__(self, prompts: int = 1, replicas: int = 2, blocks: int = 64, seqs: int = 8) -> None:
        self.engine = Engine(
            Limits(
                token_budget=16,
                max_num_seqs=seqs,
                max_model_len=64,
                block_size=4,
                share=0.0,
                prefill_replicas=prompts,
            )
        )
        self.blocks = blocks
        self.plans: dict[int, list[SendPlan]] = {n: [] for n in range(replicas)}
        self.moves: list[Move] = []
        self.tokens: dict[int, int] = {}
        self.ended: dict[int, str] = {}
        self.slots: dict[tuple[int, int], int] = {}  #: by replica and slot: whose tokens come there
        self.chunks: list[tuple[int, int]] = []
        self.epochs = [0] * replicas
        for replica in range(replicas):
            self.up(replica)

    def step(self, event: Event) -> list[Effect]:
        effects = self.engine.step(event, 0.0)
        check_integrity(self.engine)
        for effect in effects:
            if isinstance(effect, SendPlan):
                self.plans[effect.replica].append(effect)
                self.chunks.append((effect.replica, effect.tokens - effect.decodes))
            elif isinstance(effect, Move):
                self.moves.append(effect)
            elif isinstance(effect, Delivered):
                self._deliver(effect)
        return effects

    def _deliver(self, told: Delivered) -> None:
        slots = self.slots
        for slot, seq in told.starts:
            assert (told.replica, slot) not in slots
            slots[told.replica, slot] = seq.key
        for slot in range(8 * len(told.live)):
            if told.live[slot >> 3] >> (slot & 7) & 1:
                key = slots[told.replica, slot]
                assert key not in self.ended
                self.tokens[key] = self.tokens.get(key, 0) + 1
        for end in told.ends:
            if end.slot >= 0:
                slots.pop((told.replica, end.slot), None)
            if end.reason != "paused":
                assert end.seq.key not in self.ended
                self.ended[end.seq.key] = end.reason

    def up(self, replica: int) -> None:
        self.epochs[replica] += 1
        self.step(ReplicaUp(replica, self.epochs[replica], 1, self.blocks, SLOTS))

    def lose(self, replica: int) -> None:
        self.plans[replica] = []
        self.step(ReplicaLost(replica))

    def submit(self, key: int, prompt: int, output: int) -> None:
        self.step(Submitted(0, Submit(key, f"r{key}", u32([key + 1] * prompt), prompt, output)))

    def answer(self, replica: int) -> bool:
        """Return the result of the oldest plan."""
        if not self.plans[replica]:
            return False
        send = self.plans[replica].pop(0)
        plan = send.plan
        ids = bytes(4 * SLOTS)
        self.step(Returned(replica, Result(plan.epoch, plan.step, plan.lane, 0, 0, 1, 0, 0, ids)))
        return True

    def move(self) -> bool:
        if not self.moves:
            return False
        self.step(Moved(self.moves.pop(0).move))
        return True

    def drain(self) -> None:
        for _ in range(20_000):
            if not any([*(self.answer(replica) for replica in self.plans), self.move()]):
                return
        raise AssertionError("it does not end")


def test_a_prompt_is_computed_on_one_replica_and_decoded_on_another() -> None:
    cluster = Cluster()
    cluster.submit(7, 20, 5)
    while not cluster.moves:
        assert cluster.answer(0) and not cluster.plans[1]
    assert cluster.tokens == {7: 1}, "the first token comes where the prompt was computed"
    assert cluster.moves[0].tokens == 20, "the last token's KV is nowhere"
    held = cluster.engine.replicas[0].pool.held
    assert held == 5, "the blocks are kept until they have moved"
    cluster.move()
    assert cluster.engine.replicas[0].pool.held == 0
    cluster.drain()
    assert cluster.tokens == {7: 5} and cluster.ended == {7: "length"}
    assert [tokens for replica, tokens in cluster.chunks if replica == 1 and tokens] == [1], "one token is computed"


def test_a_request_of_one_token_moves_nowhere() -> None:
    cluster = Cluster()
    cluster.submit(1, 20, 1)
    cluster.drain()
    assert cluster.ended == {1: "length"} and not cluster.engine.migration.sequences()  # type: ignore[union-attr]
    assert all(replica == 0 for replica, _ in cluster.chunks)


def test_what_does_not_fit_waits_and_holds_up_admission() -> None:
    """The replica that decodes has place for two: the others' blocks stay, until the first has no more to give."""
    cluster = Cluster(seqs=2)
    for key in range(8):
        cluster.submit(key, 40, 20)
    for _ in range(200):
        cluster.answer(0)
    prompts = cluster.engine.replicas[0]
    assert len(cluster.moves) == 2
    assert prompts.pool.held >= 50 and len(prompts.waiting), "blocks of those that cannot move are all there is"
    cluster.drain()
    assert cluster.tokens == dict.fromkeys(range(8), 20)


def test_who_is_preempted_begins_again_on_a_replica_that_computes_prompts() -> None:
    cluster = Cluster(blocks=20)
    for key in range(3):
        cluster.submit(key, 20, 30)
    cluster.drain()
    assert cluster.tokens == dict.fromkeys(range(3), 30)
    assert cluster.engine.replicas[1].preemptions
    assert all(tokens <= 3 for replica, tokens in cluster.chunks if replica == 1), "no prompt is computed there"


def test_an_abort_on_the_way_frees_what_is_kept_at_once_and_what_is_written_to_when_it_has_come() -> None:
    cluster = Cluster()
    cluster.submit(0, 20, 5)
    while not cluster.moves:
        cluster.answer(0)
    cluster.step(Aborted(0, 0))
    assert cluster.engine.replicas[0].pool.held == 0
    assert cluster.engine.replicas[1].pool.held == 6
    cluster.move()
    assert cluster.engine.replicas[1].pool.held == 0
    cluster.drain()
    assert cluster.ended == {0: "abort"}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 1 << 16)), min_size=20, max_size=120),
    st.integers(1, 2),
    st.sampled_from([20, 32, 64]),
)
def test_whatever_happens_every_request_ends_with_all_its_tokens(
    happens: list[tuple[int, int]], prompts: int, blocks: int
) -> None:
    cluster = Cluster(prompts, 4, blocks, seqs=4)
    down: list[int] = []
    wanted: dict[int, int] = {}
    losses = 0
    for what, chance in happens:
        if what <= 2:
            key = len(wanted)
            wanted[key] = 1 + chance % 20
            cluster.submit(key, 1 + chance // 20 % 40, wanted[key])
        elif what == 3 and wanted:
            cluster.step(Aborted(0, chance % len(wanted)))
        elif what == 4 and losses < 2 and len(down) < 2:
            replica = chance % 4
            if replica not in down:
                losses += 1
                down.append(replica)
                cluster.lose(replica)
        elif what == 5 and down:
            cluster.up(down.pop())
        elif what == 6:
            cluster.move()
        else:
            cluster.answer(chance % 4)
    for replica in down:
        cluster.up(replica)
    cluster.drain()
    assert set(cluster.ended) == set(wanted)
    for key, reason in cluster.ended.items():
        assert reason == "abort" or cluster.tokens[key] == wanted[key]
    for replica in cluster.engine.replicas.values():
        assert replica.pool.held == 0
