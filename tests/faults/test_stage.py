"""The simulator's light stage beside the real executor, slot table and shadow: same results, same refusals."""

import random
from array import array

import pytest
from evenflow.control.core.events import Limits
from evenflow.control.wire import BatchPlan, Register, Start, ToWorker, decode_to_worker, encode
from evenflow.dataplane.executor import Limits as WorkerLimits
from evenflow.dataplane.executor import StageExecutor
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.shadow import ShadowRunner
from evenflow.dataplane.slots import PlanRefused
from faultsim.scenario import VOCAB, draw
from faultsim.stage import Build, LightStage
from inprocess import InProcess
from msgspec.structs import replace

BUILD = Build(block_size=4, num_blocks=24, max_tokens=64, num_slots=16, max_model_len=96, vocab_size=VOCAB)


def runner(stage: int, stages: int) -> ShadowRunner:
    return ShadowRunner(stage, stages, block_size=4, num_blocks=24, vocab_size=VOCAB, max_model_len=96)


class Beside:
    """A replica of light stages that is given every plan of a real one."""

    def __init__(self, stages: int) -> None:
        self.stages = [LightStage(BUILD, stage, stages) for stage in range(stages)]

    def start(self, start: Start) -> None:
        for stage in self.stages:
            stage.start(start)

    def submit(self, frames: list[bytes]) -> None:
        for stage in self.stages:
            stage.accept([decode_to_worker(frame) for frame in frames])

    def run_one(self) -> list:
        """The oldest plan through all stages."""
        hidden, results = None, []
        for stage in self.stages:
            assert stage.can_run(hidden is not None)
            stage.launch()
            outcome = stage.collect(hidden)
            hidden = outcome.hidden
            results.append(outcome.result(0, 0, 0, 0))
            if outcome.sampled is not None and not stage.first:
                self.stages[0].take_ids(outcome.sampled)
        return results


class Both(LoopbackReplica):
    """A real replica that compares each result with that of the light one beside it."""

    def __init__(self, stages: int) -> None:
        super().__init__([runner(stage, stages) for stage in range(stages)], WorkerLimits(64, 16))
        self.beside = Beside(stages)
        self._wanted: dict[int, list] = {}
        self.compared = 0

    def start(self, start: Start) -> None:
        super().start(start)
        self.beside.start(start)
        self._wanted.clear()

    def submit(self, frames) -> None:
        super().submit(frames)
        self.beside.submit(list(frames))

    def run_stage(self, stage: int):
        result = super().run_stage(stage)
        assert result is not None
        if stage == 0:
            self._wanted[result.step] = self.beside.run_one()
        light = self._wanted[result.step][stage]
        assert light == result
        self.compared += 1
        return result


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_same_results_as_the_real_executor(stages: int) -> None:
    """Preemptions, prefix hits, stops and aborts included; digests, too."""
    limits = Limits(token_budget=16, max_num_seqs=8, max_model_len=96, block_size=4)
    server = InProcess(limits, runner, stages=stages, num_slots=16, up=False)
    both = server.replicas[0] = Both(stages)
    server.bring_up(0)
    chance = random.Random(stages)
    scenario = draw(1, 1500)
    key = 0
    for _, ask in scenario.happenings * 2:
        if not hasattr(ask, "prompt"):
            continue
        prompt = list(ask.prompt)[:60]
        server.submit(key, prompt, 1 + chance.randrange(30), sampling=ask.sampling, stop_ids=ask.stop_ids)
        key += 1
        for _ in range(chance.randrange(12)):
            if actions := server.actions():
                action, replica, stage = actions[0]
                action(replica, stage)
        if chance.random() < 0.1:
            server.abort(chance.randrange(key))
    server.run(choose=lambda _: 0)
    server.assert_idle()
    assert both.compared > 100 and server.engine.replicas[0].preemptions


def messages(chance: random.Random) -> list[list[ToWorker]]:
    """Some good plans, then one that may be wrong in some way."""
    prompt = array("I", range(1, 11)).tobytes()
    slots, counts = array("H", [3]).tobytes(), array("I", [10]).tobytes()
    first = Register(3, 1, 0, prompt, 10, 0, array("I", [5, 6, 7]).tobytes(), 20)
    good: list[list[ToWorker]] = [
        [first, BatchPlan(1, 0, 0, b"", chunk_slots=slots, chunk_tokens=counts)],
        [BatchPlan(1, 1, 0, b"\x08")],
    ]
    register = replace(
        first,
        slot=chance.choice((0, 3, 4, 40)),
        generation=chance.choice((0, 1, 2)),
        computed=chance.choice((0, 4, 10, 50)),
        blocks=array("I", chance.choice(([1, 2, 3], [1], [], [99], list(range(24)) * 2))).tobytes(),
        max_len=chance.choice((20, 5, 10, 500)),
        prompt_len=chance.choice((10, 11)),
    )
    plan = BatchPlan(
        chance.choice((1, 1, 1, 2)),
        chance.choice((2, 2, 2, 2, 3)),
        0,
        chance.choice((b"", b"\x08", b"\x09", b"\0\0\0\x01", b"\x10")),
        chance.choice((b"", slots, slots * 2, b"\x03")),
        chance.choice((b"", array("I", [9]).tobytes(), array("I", [99]).tobytes(), array("I", [8, 9]).tobytes())),
        chance.choice((b"", slots, array("H", [4]).tobytes(), array("H", [0, 4]).tobytes())),
        chance.choice((b"", counts, array("I", [0]).tobytes(), array("I", [70]).tobytes(), b"\x01")),
        chance.choice((b"", b"", slots, array("H", [9]).tobytes(), array("H", [99]).tobytes())),
    )
    return [*good, [register, plan] if chance.random() < 0.5 else [plan]]


def test_the_same_refusals_as_the_real_executor() -> None:
    """A plan that one refuses, the other refuses, for the same reason unless it is wrong in two ways."""
    start = Start(1, 1, 24, 4, 16, 64, 96, "")
    chance, reasons = random.Random(1), []
    for _ in range(1000):
        real, light = StageExecutor(runner(0, 1), 0, 1, WorkerLimits(64, 16)), LightStage(BUILD, 0, 1)
        real.start(start)
        light.start(start)
        said: list[str | None] = [None, None]
        for plan in messages(chance):
            frames = [encode(message) for message in plan]
            real.accept(frames)
            light.accept([decode_to_worker(frame) for frame in frames])
        for which, stage in enumerate((real, light)):
            try:
                while stage.can_run():
                    stage.launch()
                    stage.collect()
            except PlanRefused as error:
                said[which] = str(error)
        assert (said[0] is None) == (said[1] is None), said
        reasons.append(said)
    assert len({str(real)[:16] for real, _ in reasons}) > 10
    assert sum(real == light for real, light in reasons) > 700


@pytest.mark.parametrize(
    "field", ["num_blocks", "num_slots", "token_budget", "max_model_len", "block_size", "stages"]
)
def test_an_epoch_that_asks_for_too_much_is_refused_alike(field: str) -> None:
    start = replace(Start(1, 1, 24, 4, 16, 64, 96, ""), **{field: 1000})
    said = []
    for stage in (StageExecutor(runner(0, 1), 0, 1, WorkerLimits(64, 16)), LightStage(BUILD, 0, 1)):
        with pytest.raises(PlanRefused) as refusal:
            stage.start(start)
        said.append(str(refusal.value))
    assert said[0] == said[1]
