"""Planned time on a clock of the test's own, and the tokens that crash or hang."""

import select
import time

import numpy as np
import pytest
from evenflow.control.wire import BatchPlan, Register, Start, encode
from evenflow.dataplane.simulated.__main__ import read_script
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.scripted import EARLY_S, ScriptedRunner, sleep_exactly
from evenflow.dataplane.simulated.shadow import ShadowRunner


class Device:
    """A clock that moves when somebody sleeps, each time a little too long."""

    def __init__(self) -> None:
        self.now = 100.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds + 0.0001


def submit(replica: LoopbackReplica, step: int, prompt) -> None:
    tokens = np.array(prompt, "<u4").tobytes()
    count = np.array([len(prompt)], "<u4").tobytes()
    register = Register(step, 1, 1, tokens, len(prompt), 0, np.array([step], "<u4").tobytes(), 64)
    plan = BatchPlan(1, step, 0, b"", chunk_slots=np.array([step], "<u2").tobytes(), chunk_tokens=count)
    replica.submit([encode(register), encode(plan)])


def run(replica: LoopbackReplica, step: int, prompt) -> None:
    submit(replica, step, prompt)
    replica.run_one()


def replica_of(*runners) -> LoopbackReplica:
    replica = LoopbackReplica(runners)
    replica.start(Start(1, len(runners), 64, 16, 8, 64, 512, ""))
    return replica


def test_iterations_that_follow_each_other_end_at_exact_times():
    device = Device()
    shadow = ShadowRunner(num_blocks=64)
    runner = ScriptedRunner(shadow, 0.005, 0.001, clock=device.clock, sleep=device.sleep)
    replica = replica_of(runner)
    for step in range(3):
        run(replica, step, [1, 2])
        # Neither sleeping too long nor the host's work adds up.
        assert device.now == pytest.approx(100 + 0.007 * (step + 1) + 0.0001)
        device.now += 0.0002
    # After a pause the device's time begins anew.
    device.now = 200.0
    run(replica, 3, [1])
    assert device.now == pytest.approx(200.0061)


def test_a_slow_inner_runner_is_part_of_the_cost():
    device = Device()

    class Slow(ShadowRunner):
        def run(self, batch, hidden):
            device.now += 0.004
            return super().run(batch, hidden)

    runner = ScriptedRunner(Slow(num_blocks=64), 0.005, clock=device.clock, sleep=device.sleep)
    run(replica_of(runner), 0, [1])
    assert device.now == pytest.approx(100.0051)


@pytest.mark.parametrize("seconds", [0.0, EARLY_S / 2, 0.002])
def test_nobody_wakes_before_the_end(seconds):
    began = time.monotonic()
    sleep_exactly(seconds)
    assert time.monotonic() - began >= seconds


@pytest.mark.parametrize("ended", [True, False])
def test_the_end_of_an_iteration_is_told_by_a_descriptor(ended):
    device = Device()
    runner = ScriptedRunner(ShadowRunner(num_blocks=64), 3600, clock=device.clock, sleep=device.sleep)
    replica = replica_of(runner)
    (executor,) = replica.executors
    readable = select.poll()
    readable.register(runner.done, select.POLLIN)
    assert not readable.poll(0)
    device.now = time.monotonic() - 3600 * ended
    submit(replica, 0, [1])
    assert executor.can_run()
    assert executor.launch()
    assert bool(readable.poll(5000 * ended)) is ended
    outcome = executor.collect()
    assert outcome.ended_us - outcome.started_us == pytest.approx(3600e6, abs=2)
    device.now = time.monotonic()
    submit(replica, 1, [1])
    assert executor.can_run()
    assert executor.launch()
    assert not readable.poll(0)


def test_without_planned_time_an_iteration_ends_at_its_launch():
    assert ScriptedRunner(ShadowRunner(num_blocks=64)).done is None


@pytest.mark.parametrize("stage", [0, 1])
def test_poison_is_seen_in_every_stage(stage):
    seen = []
    options = {"crash_on": 666, "crash": lambda: seen.append("crash"), "hang": lambda: seen.append("hang")}
    shadows = [ShadowRunner(stage, 2, num_blocks=64) for stage in range(2)]
    runners = [
        ScriptedRunner(shadow, **options, hang_on=777) if shadow is shadows[stage] else shadow for shadow in shadows
    ]
    replica = replica_of(*runners)
    run(replica, 0, [1, 2])
    assert seen == []
    run(replica, 1, [1, 666])
    run(replica, 2, [777, 1])
    assert seen == ["crash", "hang"]


@pytest.mark.parametrize("text", ["{}", "[1, -2]", "[1.5]", "[true]", "nonsense"])
def test_a_script_is_a_list_of_ids(tmp_path, text):
    path = tmp_path / "script"
    path.write_text(text)
    with pytest.raises(ValueError):
        read_script(path)
    path.write_text("[1, 2]")
    assert read_script(path) == [1, 2]
