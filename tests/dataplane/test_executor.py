"""The executor: order of plans, epochs, lookahead over loopback links, stops, and what it refuses."""

import numpy as np
import pytest
from evenflow.control.wire import BatchPlan, Heartbeat, Register, Start, encode
from evenflow.control.wire.digest import audit_digest
from evenflow.dataplane.executor import Limits, StageExecutor
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from evenflow.dataplane.simulated.shadow import ShadowRunner, shadow_tokens
from evenflow.dataplane.slots import PlanRefused

PROMPT = [11, 12, 13, 14, 15]


def start(stages: int = 1, **changes: object) -> Start:
    fields = {
        "epoch": 1,
        "stages": stages,
        "num_blocks": 64,
        "block_size": 16,
        "num_slots": 8,
        "token_budget": 32,
        "max_model_len": 256,
        "links": "",
    }
    return Start(**{**fields, **changes})


def register(slot: int = 0, generation: int = 1, **changes: object) -> bytes:
    fields = {"request": 1, "prompt_len": len(PROMPT), "computed": 0, "max_len": 256}
    tokens = np.array(changes.pop("tokens", PROMPT), "<u4").tobytes()
    blocks = np.array([slot, slot + 1], "<u4").tobytes()
    return encode(Register(slot, generation, tokens=tokens, blocks=blocks, **{**fields, **changes}))


def chunk(step: int, slot: int = 0, tokens: int = len(PROMPT), epoch: int = 1, released: bytes = b"") -> bytes:
    return encode(
        BatchPlan(
            epoch,
            step,
            0,
            b"",
            chunk_slots=np.array([slot], "<u2").tobytes(),
            chunk_tokens=np.array([tokens], "<u4").tobytes(),
            released=released,
        )
    )


def decode(step: int, slots: int = 1) -> bytes:
    return encode(BatchPlan(1, step, 0, bytes([slots])))


def replica(stages: int) -> LoopbackReplica:
    made = LoopbackReplica([ShadowRunner(stage, stages, num_blocks=64) for stage in range(stages)])
    made.start(start(stages))
    return made


def test_sec_1_plans_far_ahead_of_what_runs_are_refused():
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.start(start())
    executor.accept([register(), chunk(0)])
    for step in range(1, 1000):
        executor.accept([encode(BatchPlan(1, step, 0, b""))])
    ran = 0
    with pytest.raises(PlanRefused, match="plans before it wait"):
        while executor.can_run():
            executor.execute()
            ran += 1
    assert 60 < ran < 100


def test_a_pipeline_runs_ahead_and_waits_for_the_ids_of_its_rows():
    pipe = replica(3)
    expected = shadow_tokens(PROMPT, 4)
    pipe.submit([register(), chunk(0)])
    pipe.submit([decode(1)])
    pipe.submit([register(1), chunk(2, slot=1)])
    assert pipe.run_stage(0).step == 0
    assert pipe.run_stage(0) is None, "the decode's input is not sampled yet"
    assert pipe.run_stage(2) is None, "its input is still in stage 1"
    assert pipe.run_stage(1).ids == b""
    result = pipe.run_stage(2)
    assert np.frombuffer(result.ids, "<u4").tolist() == expected[:1]
    assert not pipe.can_run(0)
    assert pipe.deliver_ids()
    assert pipe.run_stage(0).step == 1
    # The chunk of another sequence runs before that decode has left the pipeline.
    assert pipe.run_stage(0).step == 2
    assert [pipe.run_stage(1).step, pipe.run_stage(1).step] == [1, 2]
    ids = [np.frombuffer(pipe.run_stage(2).ids, "<u4").tolist() for _ in range(2)]
    assert ids[0] == expected[1:2]
    assert ids[1][1] == expected[0]
    pipe.deliver_ids()
    pipe.deliver_ids()
    pipe.submit([decode(3, slots=0b11)])
    assert np.frombuffer(pipe.run_one()[-1].ids, "<u4").tolist() == [expected[2], expected[1]]


def test_late_ids_of_an_older_generation_do_not_reach_the_next_owner_of_the_slot():
    pipe = replica(2)
    pipe.submit([register(), chunk(0)])
    assert [pipe.run_stage(0).step, pipe.run_stage(1).step] == [0, 0]
    again = register(generation=2, tokens=[*PROMPT, 77])
    pipe.submit([again, chunk(1, tokens=6, released=b"\0\0")])
    pipe.run_stage(0)
    pipe.deliver_ids()
    pipe.submit([decode(2)])
    assert not pipe.can_run(0)
    pipe.run_stage(1)
    pipe.deliver_ids()
    assert np.frombuffer(pipe.run_one()[-1].ids, "<u4").tolist() == shadow_tokens([*PROMPT, 77], 2)[1:]


def test_stop_flags():
    ids = shadow_tokens(PROMPT, 2)
    pipe = replica(2)
    pipe.submit(
        [register(stop_ids=(ids[0],)), register(1, stop_ids=(ids[0],), min_len=7), chunk(0, 0)],
    )
    assert pipe.run_one()[-1].stopped == b"\0\0"
    pipe.submit([chunk(1, 1)])
    assert pipe.run_one()[-1].stopped == b""


def test_a_plan_without_rows_computes_nothing_and_has_a_result():
    pipe = replica(2)
    pipe.submit([register(), chunk(0)])
    pipe.submit([encode(BatchPlan(1, 1, 0, b"", released=b"\0\0"))])
    assert [result.step for result in pipe.run_one()] == [0, 0]
    results = pipe.run_one()
    assert [(result.step, result.ids) for result in results] == [(1, b""), (1, b"")]
    assert pipe.run_one() == []


def test_the_digest_is_that_of_its_step_although_the_next_plan_is_applied_early():
    pipe = replica(2)
    pipe.submit([register(), encode(BatchPlan(1, 0, 0, b""))])
    for step in range(1, 15):
        pipe.submit([encode(BatchPlan(1, step, 0, b""))])
    pipe.submit([chunk(15, tokens=2)])
    pipe.submit([chunk(16, tokens=3)])
    results = [pipe.run_one() for _ in range(17)]
    digests = [{result.digest for result in row} for row in results]
    assert digests[:15] == [{None}] * 15
    assert len(digests[15]) == 1
    assert None not in digests[15]
    assert digests[16] == {None}


def test_a_new_epoch_forgets_everything():
    pipe = replica(2)
    pipe.submit([register(), chunk(0)])
    pipe.submit([decode(1)])
    pipe.run_stage(0)
    pipe.start(start(2, epoch=9))
    assert pipe.run_one() == []
    pipe.submit([decode(0)])
    with pytest.raises(PlanRefused, match="epoch 1 in epoch 9"):
        pipe.can_run(0)
    pipe.start(start(2, epoch=10))
    pipe.submit([register(), chunk(0, epoch=10)])
    assert np.frombuffer(pipe.run_one()[-1].ids, "<u4").tolist() == shadow_tokens(PROMPT, 1)


@pytest.mark.parametrize(
    ("frames", "reason"),
    [
        ([decode(1)], "step 1 came, 0 was expected"),
        ([chunk(0, epoch=2)], "epoch 2 in epoch 1"),
        ([encode(Heartbeat()), decode(0)], "no REGISTER"),
        ([register()], "no PLAN"),
        ([], "no PLAN"),
        ([b"\x80\x04garbage"], "not a plan"),
    ],
)
def test_refused_plans_close_the_epoch(frames, reason):
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.start(start())
    executor.accept(frames)
    assert executor.refused
    with pytest.raises(PlanRefused, match=reason):
        executor.can_run()
    executor.accept([register(), chunk(0)])
    assert not executor.can_run()
    executor.start(start())
    executor.accept([register(), chunk(0)])
    assert executor.can_run()


def test_a_broken_reference_shows_when_its_turn_comes():
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.start(start())
    executor.accept([register(), chunk(0)])
    executor.accept([decode(1, slots=2)])
    executor.execute()
    with pytest.raises(PlanRefused, match="step 1: rows: slot 1 is not registered"):
        executor.can_run()
    assert not executor.can_run()


def running(*plans: list[bytes]) -> StageExecutor:
    """An executor whose device has the first plan; the second is derived already."""
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.start(start())
    for frames in plans:
        executor.accept(frames)
    assert executor.can_run()
    executor.launch()
    executor.prepare()
    assert executor.running
    return executor


def test_a_broken_reference_found_ahead_does_not_touch_what_runs():
    executor = running([register(), chunk(0)], [decode(1, slots=2)])
    result = executor.collect().result()
    assert np.frombuffer(result.ids, "<u4").tolist() == shadow_tokens(PROMPT, 1)
    with pytest.raises(PlanRefused, match="step 1: rows: slot 1 is not registered"):
        executor.can_run()


def test_what_was_queued_before_a_refused_plan_still_runs():
    executor = running([register(), chunk(0)], [decode(1)])
    executor.accept([decode(3)])
    executor.accept([decode(2)])
    expected = shadow_tokens(PROMPT, 2)
    assert executor.collect().sampled.ids.tolist() == expected[:1]
    assert executor.can_run()
    assert executor.execute().sampled.ids.tolist() == expected[1:]
    with pytest.raises(PlanRefused, match="step 3 came, 2 was expected"):
        executor.can_run()
    assert not executor.can_run()


def test_ids_belong_to_the_sequences_of_their_own_plan_whatever_was_derived_since():
    (first,) = shadow_tokens(PROMPT, 1)
    again = register(generation=2, tokens=[7, 8], prompt_len=2, stop_ids=(first + 1,))
    executor = running(
        [register(stop_ids=(first,)), chunk(0)],
        [again, chunk(1, tokens=2, released=b"\0\0")],
    )
    outcome = executor.collect()
    assert outcome.sampled.generations.tolist() == [1]
    assert outcome.result().stopped == b"\0\0"
    assert executor.can_run()
    outcome = executor.execute()
    assert outcome.sampled.generations.tolist() == [2]
    assert np.frombuffer(outcome.result().ids, "<u4").tolist() == shadow_tokens([7, 8], 1)
    assert outcome.result().stopped == b""


@pytest.mark.parametrize("ahead", [False, True])
def test_the_digest_of_an_audited_step_does_not_see_the_next(ahead):
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.start(start())
    executor.accept([register(), chunk(0)])
    for step in range(1, 17):
        executor.accept([decode(step)] if step != 16 else [encode(BatchPlan(1, 16, 0, b"", released=b"\0\0"))])
    digests = []
    for _ in range(17):
        assert executor.can_run()
        executor.launch()
        if ahead:
            executor.prepare()
        digests.append(executor.collect().digest)
    # After step 15 the prompt and 14 of the 15 sampled tokens are in the cache, and slot 0 is not released yet.
    assert digests == [None] * 15 + [audit_digest([(0, 1, len(PROMPT) + 15, [0, 1])]), None]


def test_a_new_epoch_begins_while_an_iteration_runs():
    executor = running([register(), chunk(0)], [decode(1)])
    executor.start(start(epoch=2))
    assert not executor.running
    assert not executor.can_run()
    executor.accept([register(tokens=[3, 4], prompt_len=2), chunk(0, tokens=2, epoch=2)])
    assert executor.can_run()
    outcome = executor.execute()
    assert outcome.result().epoch == 2
    assert outcome.sampled.ids.tolist() == shadow_tokens([3, 4], 1)
    with pytest.raises(RuntimeError, match="nothing runs"):
        executor.collect()


def test_plans_before_an_epoch_are_refused():
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1)
    executor.accept([decode(0)])
    with pytest.raises(PlanRefused, match="before an epoch"):
        executor.can_run()


@pytest.mark.parametrize(
    "changes",
    [
        {"stages": 2},
        {"block_size": 8},
        {"num_blocks": 65},
        {"num_blocks": 0},
        {"num_slots": 9},
        {"token_budget": 65},
        {"max_model_len": 8193},
    ],
)
def test_an_epoch_that_asks_for_more_than_there_is_is_refused(changes):
    executor = StageExecutor(ShadowRunner(num_blocks=64), 0, 1, Limits(max_tokens=64, num_slots=8))
    with pytest.raises(PlanRefused, match=next(iter(changes))):
        executor.start(start(**changes))
    executor.accept([decode(0)])
    assert not executor.can_run()


def test_hello_says_what_the_worker_has():
    hello = StageExecutor(ShadowRunner(num_blocks=64), 1, 3, Limits(64, 8)).hello(replica=2, pid=5)
    assert (hello.replica, hello.stage, hello.stages, hello.pid) == (2, 1, 3, 5)
    assert (hello.num_blocks, hello.max_tokens, hello.num_slots, hello.eos_ids) == (64, 64, 8, (0,))
