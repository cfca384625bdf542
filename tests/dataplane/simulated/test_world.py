"""The core in virtual time: exact times of small loads, an oracle of every token, equal repeats."""

import itertools
from array import array
from hashlib import sha256
from random import Random

import pytest
from evenflow.control.core.events import Aborted, Delivered, Effect, Limits, SendPlan, Submitted
from evenflow.control.core.integrity import check_integrity
from evenflow.control.core.packing import bits
from evenflow.control.wire import Result, Submit
from evenflow.dataplane.simulated.cost import DeviceCost, Work
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.figures import summarise, weighted
from evenflow.dataplane.simulated.load import Entry, arrivals, poisson
from evenflow.dataplane.simulated.scenario import Scenario
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.stages import ModelledStages
from evenflow.dataplane.simulated.world import Arrival, ReplicaModel, World

POLICIES = ("stall-free", "prefill-first", "hybrid", "request-level", "chunked-only", "hybrid-only")


class Law:
    """1,000 µs an iteration and 10 a token; 100 for a transfer."""

    def __init__(self) -> None:
        self.works: list[Work] = []

    def stage_us(self, stage: int, work: Work) -> int:
        if not stage:
            self.works.append(work)
        return 1000 + 10 * work.tokens

    def transfer_us(self, tokens: int) -> int:
        return 100


class Watched(World):
    """Follows every token of every request by itself."""

    def __init__(self, limits: Limits, replicas: list[ReplicaModel], **settings: int) -> None:
        self.times: dict[int, list[int]] = {}
        self.plans: list[SendPlan] = []
        self.owners: dict[tuple[int, int], int] = {}
        super().__init__(limits, replicas, watch=self.note, **settings)  # pyright: ignore[reportArgumentType]
        inner = self.record.delivered

        def delivered(told: Delivered, now: int) -> None:
            inner(told, now)
            for slot, seq in told.starts:
                self.owners[told.replica, slot] = seq.key
            for slot in bits(bytes(told.live)):
                self.times.setdefault(self.owners[told.replica, slot], []).append(now)
            if not self.iterations % 16:
                check_integrity(self.engine)

        self.record.delivered = delivered  # pyright: ignore[reportAttributeAccessIssue]

    def note(self, send: SendPlan, results: list[Result]) -> None:
        self.plans.append(send)


def limits(**changes: object) -> Limits:
    settings: dict[str, object] = {"token_budget": 64, "max_num_seqs": 8, "max_model_len": 512, "share": 0.0}
    return Limits(**(settings | changes))  # pyright: ignore[reportArgumentType]


def test_one_request_by_hand() -> None:
    law = Law()
    world = Watched(limits(), [ReplicaModel(law, 1, 100)], hop_us=50)
    world.feed([Arrival(1_000_000, 100, 3)])
    assert world.run()
    # Chunks of 64 and 36, then two decodes; plans are sent ahead, so only the first and the last hop show.
    start = 1_000_050
    first = start + 1640 + 1360
    assert world.times == {0: [first + 50, first + 1010 + 50, first + 2020 + 50]}
    record = world.record
    assert (record.scheduled[0], record.first[0], record.ended[0]) == (start, first + 50, first + 2020 + 50)
    figures = summarise(record)
    assert figures.ttft.p50 == pytest.approx(0.0031) and figures.tbt.most == pytest.approx(0.00101)
    assert (figures.tbt.count, figures.pooled_tbt.count) == (2, 3)
    assert [(work.tokens, work.sampled, work.chunks) for work in law.works] == [
        (64, 0, [(64, 0)]),
        (36, 1, [(36, 64)]),
        (1, 1, []),
        (1, 1, []),
    ]


def test_stages_follow_each_other() -> None:
    """Two stages: the second waits for hidden states, the first for ids."""
    world = Watched(limits(), [ReplicaModel(Law(), 2, 100)], hop_us=50)
    world.feed([Arrival(0, 1, 2)])
    world.run()
    first = 50 + 1010 + 100 + 1010
    second = first + 50 + 1010 + 100 + 1010
    assert world.times == {0: [first + 50, second + 50]}


def test_padding_of_request_level_batches() -> None:
    """Prompts are padded to the longest, and rows that have ended cost until the last one ends."""
    law = Law()
    stages = World(limits(policy="request-level", token_budget=512), [ReplicaModel(law, 1, 200)])
    stages.feed([Arrival(0, 100, 2), Arrival(0, 40, 5), Arrival(1, 10, 1)])
    stages.run()
    assert stages.record.finished == 3
    # The first batch is what had come when it was planned: one request; the others wait for its end.
    batches = [(work.tokens, work.kv_tokens, work.chunks) for work in law.works]
    assert batches[:2] == [(100, 0, [(100, 0)]), (1, 101, [])]
    assert batches[2] == (80, 0, [(40, 0), (40, 0)])
    assert [work.tokens for work in law.works[3:]] == [2, 2, 2, 2], "the ended row is still there"


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("seed", range(2))
def test_every_token_is_recorded(policy: str, stages: int, seed: int) -> None:
    """Against an oracle that follows each request alone; few blocks, so that requests are preempted and come back."""
    chance = Random(seed)
    budget = 512 if policy in ("stall-free", "chunked-only") else 1000
    settings = limits(policy=policy, token_budget=64 if budget == 512 else budget, max_num_seqs=12)
    world = Watched(settings, [ReplicaModel(Law(), stages, 32)] * 2)
    coming = [Entry(chance.randint(1, 200), chance.randint(1, 80)) for _ in range(30)]
    world.feed(arrivals(coming, poisson(300.0, seed), 400))
    assert world.run()
    record = world.record
    assert record.finished == 30 == len(world.times) and not record.rejected
    for key, times in world.times.items():
        assert len(times) == record.outputs[key]
        assert (record.first[key], record.ended[key]) == (times[0], times[-1])
        assert record.arrived[key] <= record.scheduled[key] < times[0]
    wanted = [(b - a, 1) for times in world.times.values() for a, b in itertools.pairwise(times)]
    assert weighted(zip(record.gaps, record.counts, strict=True)) == weighted(wanted)
    assert record.tokens == sum(record.outputs)
    preempted = sum(replica.preemptions for replica in world.engine.replicas.values())
    if policy in ("hybrid", "request-level"):
        assert not preempted
    elif policy == "stall-free" and stages == 1:
        assert preempted, "the test shows nothing of preemption"


def digest(policy: str, stages: int) -> str:
    scenario = Scenario(
        KNOWN["mistral-7b"],
        load_device("a100-pcie"),
        stages=stages,
        replicas=2,
        policy=policy,
        length=4096,
        prefix_caching=True,
    )
    world = World(scenario.limits(), scenario.models())
    chance = Random(7)
    entries = [Entry(chance.randint(1, 3000), chance.randint(1, 60)) for _ in range(40)]
    world.feed(arrivals(entries, poisson(6.0, 7), 4096))
    world.run()
    record = world.record
    columns = (record.arrived, record.scheduled, record.first, record.ended, record.gaps, record.counts)
    return sha256(b"".join(column.tobytes() for column in columns)).hexdigest()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("stages", [1, 2])
def test_repeats_are_equal_to_the_bit(policy: str, stages: int) -> None:
    assert digest(policy, stages) == digest(policy, stages)


def test_equal_hashes_share_blocks() -> None:
    """Two requests with the same first 512 tokens by hash: the second one's are cached."""
    scenario = Scenario(KNOWN["mistral-7b"], load_device("a100-pcie"), length=4096, prefix_caching=True)
    world = World(scenario.limits(), scenario.models())
    entries = [Entry(1000, 5, None, (7, 8), 512), Entry(1000, 5, None, (7, 9), 512)]
    world.feed(arrivals(entries, [0.0, 10.0], 4096))
    world.run()
    assert sum(replica.cache_hits for replica in world.engine.replicas.values()) == 512
    first, second = (world.record.first[key] - world.record.arrived[key] for key in range(2))
    assert second < 0.7 * first


def test_a_run_can_be_stopped_and_goes_on() -> None:
    def make() -> World:
        world = World(limits(), [ReplicaModel(Law(), 1, 100)])
        world.feed([Arrival(at * 1000, 50, 20) for at in range(10)])
        return world

    whole, parts = make(), make()
    assert whole.run()
    assert not parts.run(until=5_000) and parts.now == 5_000
    assert not parts.run(stop=lambda world: world.now > 20_000, every=1)
    assert parts.run() and parts.record.ended == whole.record.ended


def test_events_of_ones_own() -> None:
    """An abort at a time: nothing comes after it, and the others are not held up."""
    world = Watched(limits(), [ReplicaModel(Law(), 1, 100)])
    world.feed([Arrival(0, 50, 200), Arrival(0, 50, 20)])
    world.at(30_000, Aborted(0, 0))
    world.run()
    assert len(world.times[1]) == 20 and max(world.times[0]) <= 30_000 < world.now + 1


def test_refused_requests_are_told() -> None:
    world = World(limits(), [ReplicaModel(Law(), 1, 100)])
    world.feed([Arrival(0, 600, 5), Arrival(10, 50, 5)])
    world.run()
    assert [refusal.field for refusal in world.record.rejected] == ["tokens"]
    assert next(iter(world.record.ended)) == -1 and world.record.finished == 1


def test_memory_is_bounded_by_what_is_unfinished() -> None:
    """Requests are made when they arrive, and forgotten by the core when they end."""
    world = World(limits(), [ReplicaModel(Law(), 1, 100)])
    made = 0

    def source() -> object:
        nonlocal made
        for number in range(500):
            made += 1
            yield Arrival(number * 50_000, 50, 5)

    world.feed(source())  # pyright: ignore[reportArgumentType]

    def look(world: World) -> bool:
        unfinished = sum(map(len, world.engine.requests.values()))
        assert made <= len(world.record.arrived) + 1 and unfinished <= 4
        return False

    assert world.run(stop=look, every=1) and world.record.finished == 500


def test_the_cost_is_asked_with_contexts() -> None:
    """A long prompt's chunks carry what was computed before them, also when several plans are out."""
    law = Law()
    world = World(limits(), [ReplicaModel(law, 2, 100)])
    world.feed([Arrival(0, 300, 1)])
    world.run()
    before = 0
    for work in law.works:
        [(taken, context)] = work.chunks
        assert context == before
        before += taken
    assert before == 300


def test_stages_report_idle_time() -> None:
    stages = ModelledStages(Law(), 1, 8, hop_us=0)
    submit = Submit(0, "r0", array("I", [1] * 64).tobytes(), 64, 1)
    effects: list[Effect] = World(limits(), [ReplicaModel(Law(), 1, 100)]).engine.step(Submitted(0, submit), 0.0)
    [send] = [effect for effect in effects if isinstance(effect, SendPlan)][:1]
    [result] = stages.run(send, 500)
    assert (result.started_us, result.ended_us, result.idle_us, result.starved_us) == (500, 2140, 500, 500)
    assert array("I", result.ids).tolist() == [0] * 8


def test_a_whole_model_costs_what_its_parts_do() -> None:
    scenario = Scenario(KNOWN["yi-34b"], load_device("a100-pcie"), ranks=2, length=8192)
    cost = scenario.cost()
    assert isinstance(cost, DeviceCost)
    work = Work(40, 8, 8 * 1000, [(32, 100)], 8, 0.0)
    layer = cost.products_ms(40) + cost.elements_ms(40) + cost.reduces_ms(40)
    layer += cost.prefill_ms(32, 100) + cost.decode_ms(8, 8000)
    assert cost.stage_us(0, work) > 1e3 * 60 * layer
