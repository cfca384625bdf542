"""The same model in real time: a worker's batches cost what the simulator's plans do, and ids stay right."""

import random
from array import array

import numpy as np
import pytest
from evenflow.control.core.events import SendPlan
from evenflow.control.wire import Result, Start, encode
from evenflow.dataplane.batch import StageBatch
from evenflow.dataplane.profile import SHAPES
from evenflow.dataplane.simulated.cost import Work
from evenflow.dataplane.simulated.device import load_device
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.modelled import timing_of, work_of
from evenflow.dataplane.simulated.refusal import CannotSimulate
from evenflow.dataplane.simulated.scenario import Scenario, parse_devices, profile_of, served_cost
from evenflow.dataplane.simulated.scripted import ScriptedRunner
from evenflow.dataplane.simulated.shadow import ShadowRunner
from evenflow.dataplane.simulated.shape import KNOWN
from evenflow.dataplane.simulated.stages import ModelledStages
from evenflow.dataplane.simulated.world import Arrival, World


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class Twin(ShadowRunner):
    """Keeps the work of each batch."""

    def __init__(self, stage: int, stages: int) -> None:
        super().__init__(stage, stages, num_blocks=256, max_model_len=512)
        self.works: list[Work] = []

    def launch(self, batch: StageBatch, hidden: np.ndarray | None) -> None:
        self.works.append(work_of(batch))
        super().launch(batch, hidden)


@pytest.mark.parametrize("stages", [1, 3])
def test_a_batch_is_as_much_work_as_its_plan(monkeypatch: pytest.MonkeyPatch, stages: int) -> None:
    """Plans that the core makes in virtual time run on real executors: both see the same work, and its cost."""
    scenario = Scenario(
        KNOWN["mistral-7b"],
        load_device("h100"),
        stages=stages,
        token_budget=48,
        max_num_seqs=8,
        length=512,
        blocks=256,
    )
    cost = scenario.cost()
    clock = Clock()
    twins = [Twin(stage, stages) for stage in range(stages)]
    timings = [timing_of(cost, stage) for stage in range(stages)]
    runners = [
        ScriptedRunner(twin, timing=timing, clock=clock, sleep=clock.sleep)
        for twin, timing in zip(twins, timings, strict=True)
    ]
    replica = LoopbackReplica(runners)
    works: list[Work] = []
    seen = ModelledStages._work

    def kept(self: ModelledStages, send: SendPlan) -> Work:
        works.append(seen(self, send))
        return works[-1]

    monkeypatch.setattr(ModelledStages, "_work", kept)
    took: list[float] = []

    def watch(send: SendPlan, results: list[Result]) -> None:
        if not send.plan.step:
            replica.start(Start(1, stages, 256, 16, 80, 48, 512, ""))
        began = clock.now
        replica.submit([*map(encode, send.registers), encode(send.plan)])
        assert len(replica.run_one()) == stages
        took.append(clock.now - began)

    world = World(scenario.limits(), scenario.models(), watch=watch)
    draw = random.Random(2)
    world.feed(Arrival(round(n * 2e4), draw.randrange(1, 200), draw.randrange(1, 30)) for n in range(40))
    assert world.run() and world.record.finished == 40
    assert len(took) == len(works) > 60
    for twin in twins:
        for ours, theirs in zip(twin.works, works, strict=True):
            for name in ("tokens", "decodes", "kv_tokens", "attention"):
                assert getattr(ours, name) == getattr(theirs, name)
            # The order of rows is the worker's, and who samples is known at the end of a pipeline.
            assert sorted(ours.chunks) == sorted(theirs.chunks)
            assert ours.sampled == theirs.sampled or twin is not twins[-1]
    for seconds, work in zip(took, works, strict=True):
        assert seconds == pytest.approx(
            sum(cost.stage_us(stage, work) for stage in range(stages)) / 1e6
            + cost.transfer_us(work.tokens) / 1e6 * (stages - 1),
            rel=0.01,
            abs=1e-4 * stages,
        )


def test_a_worker_foretells_what_the_simulator_does() -> None:
    shape, cost = served_cost("yi-34b", "2xa100-pcie", 1)
    assert shape.name == "yi-34b" and cost.ranks == 2
    samples = ScriptedRunner(ShadowRunner(), timing=timing_of(cost, 0)).profile(4096)
    foretold = {(s.prefill, s.attention, s.decodes, s.kv_tokens): s.took_us for s in profile_of(cost)}
    assert len(samples) == len(SHAPES) > 4
    for sample in samples:
        expected = foretold[sample.prefill, sample.attention, sample.decodes, sample.kv_tokens]
        assert sample.took_us == pytest.approx(expected, abs=1)


def test_devices_by_number() -> None:
    assert parse_devices("h100") == (1, "h100") and parse_devices("8xh100") == (8, "h100")
    assert parse_devices("./4xh100.json") == (1, "./4xh100.json")
    for wrong, words in (
        ("3xh100", "which 3 ranks cannot share"),
        ("b200", "there is no device"),
        ("0xh100", "there is no device"),
    ):
        with pytest.raises(CannotSimulate, match=words):
            served_cost("yi-34b", wrong, 1)
    with pytest.raises(CannotSimulate, match="GB for its weights"):
        served_cost("falcon-180b", "h100", 1)


def test_ids_of_several_stages_are_those_of_one() -> None:
    """Planned time changes nothing about what is computed."""
    answers: list[bytes] = []
    for stages in (1, 4):
        _, cost = served_cost("mistral-7b", "h100", stages)
        clock = Clock()
        runners = [
            ScriptedRunner(
                ShadowRunner(stage, stages, num_blocks=64),
                timing=timing_of(cost, stage),
                clock=clock,
                sleep=clock.sleep,
            )
            for stage in range(stages)
        ]
        replica = LoopbackReplica(runners)
        replica.start(Start(1, stages, 64, 16, 8, 64, 512, ""))
        scenario = Scenario(
            KNOWN["mistral-7b"], load_device("h100"), token_budget=64, max_num_seqs=4, length=512, blocks=64
        )
        ids = array("I")

        def watch(
            send: SendPlan, results: list[Result], replica: LoopbackReplica = replica, ids: array = ids
        ) -> None:
            replica.submit([*map(encode, send.registers), encode(send.plan)])
            ids.frombytes(replica.run_one()[-1].ids)

        world = World(scenario.limits(), scenario.models(), slots=8, watch=watch)
        world.feed(Arrival(n, 20 + 9 * n, 6) for n in range(4))
        assert world.run()
        answers.append(ids.tobytes())
    assert answers[0] == answers[1] and len(set(answers[0])) > 20
