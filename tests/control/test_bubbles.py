"""The bubble account: a pipeline's idle time worked out by hand, and its laws on made-up pipelines."""

import random
from collections.abc import Sequence

import pytest
from evenflow.control.bubbles import (
    CAUSES,
    NO_WORK,
    PB1,
    PB2,
    PB3,
    PLAN_LATE,
    Batch,
    BubbleAccount,
    apportion,
    declared_costs,
    modelled_costs,
)
from evenflow.control.core.events import SendPlan
from evenflow.control.core.timing import Features, TimeModel
from evenflow.control.wire import BatchPlan, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st


def plan(step: int, chunk: int, kv_tokens: int, *, awaits: int = -1, dry_us: int = 0, spare: int = 0) -> SendPlan:
    """A plan with a chunk of so many tokens, and a decode, if any, that reads ``kv_tokens``."""
    decodes = int(kv_tokens > 0)
    batch = BatchPlan(1, step, 0, b"\1" if decodes else b"")
    return SendPlan(
        0, [], batch, None, chunk + decodes, decodes, kv_tokens, dry_us=dry_us, awaits=awaits, spare=spare
    )


def result(step: int, started: int, ended: int, idle: int, starved: int = 0) -> Result:
    return Result(1, step, 0, 0, started, ended, idle, starved)


def by_hand(batch: Batch) -> tuple[int, int]:
    """The cost law of the examples: ten microseconds a prompt's token, one a KV token."""
    return 10 * batch.chunk_tokens, batch.kv_tokens


def named(account: BubbleAccount, stage: int) -> dict[str, int]:
    causes = zip(CAUSES, account.accounts[stage].causes, strict=True)
    return {cause: idle for cause, idle in causes if idle}


# ---- by hand -------------------------------------------------------------------------------------------------


#: Two lanes on two stages, without transfer times: (chunk, KV tokens, awaited step, dry), then what a stage reports,
#: (start, end, idle before, of which without a plan), and what that idle time is.
TWO_STAGES = [
    # A: a chunk of 20. Nothing lies before it.
    ((20, 0, -1, 0), (0, 200, 0, 0), {}, (200, 400, 200, 0), {}),
    # B: a chunk of 10.
    ((10, 0, -1, 0), (200, 300, 0, 0), {}, (400, 500, 0, 0), {}),
    # A decodes: its ids come at 400. The chunk of step 0 is larger than that of step 1.
    ((0, 50, 0, 0), (400, 450, 100, 0), {PB1: 100}, (500, 550, 0, 0), {}),
    # B decodes: its ids come at 500. A chunk was waited for after a decode. Stage 1 waits for stage 0's wait.
    ((0, 80, 1, 0), (500, 580, 50, 0), {PB2: 50}, (580, 660, 30, 0), {PB2: 30}),
    # A: ids came at 550.
    ((0, 51, 2, 0), (580, 631, 0, 0), {}, (660, 711, 0, 0), {}),
    # B: ids come at 660. Its decode reads more than A's did. Stage 1 waits for that, and 1 us for its own growth.
    ((0, 81, 3, 0), (660, 741, 29, 0), {PB3: 29}, (741, 822, 30, 0), {PB3: 30}),
    # A: ids came at 711, but the plan comes at 800. It is there when stage 1 is free: it waits for stage 0.
    ((0, 52, 4, 0), (800, 852, 59, 59), {PLAN_LATE: 59}, (852, 904, 30, 0), {PLAN_LATE: 30}),
    # Both lanes have ended. A new prompt's plan comes at 2000, the core had had nothing to plan for 1000 us. Stage 1:
    # 1000 and 96 as it sees the plan, 52 us of stage 0's 148, and a chunk that takes 248 us more than the decode.
    (
        (30, 0, -1, 1000),
        (2000, 2300, 1148, 1148),
        {NO_WORK: 1000, PLAN_LATE: 148},
        (2300, 2600, 1396, 1096),
        {NO_WORK: 1000, PLAN_LATE: 148, PB2: 248},
    ),
]


def test_two_stages_by_hand() -> None:
    account = BubbleAccount(2, by_hand)
    sums = [[0] * len(CAUSES), [0] * len(CAUSES)]
    for step, ((chunk, kv_tokens, awaits, dry), *stages) in enumerate(TWO_STAGES):
        account.planned(plan(step, chunk, kv_tokens, awaits=awaits, dry_us=dry))
        for stage in range(2):
            times, expected = stages[2 * stage : 2 * stage + 2]
            account.returned(stage, result(step, *times))
            for cause, idle in expected.items():
                sums[stage][cause] += idle
            assert account.accounts[stage].causes == sums[stage], f"step {step}, stage {stage}"
    assert named(account, 0) == {"pb1": 100, "pb2": 50, "pb3": 29, "plan_late": 207, "no_work": 1000}
    assert named(account, 1) == {"pb2": 278, "pb3": 30, "plan_late": 178, "no_work": 1000}
    first, second = account.accounts
    assert (first.iterations, first.late, first.busy_us, first.idle_us) == (8, 1, 914, 1386)
    assert (second.iterations, second.late, second.busy_us, second.idle_us) == (8, 0, 914, 1486)
    # All the time from the first iteration's start to the last one's end.
    assert first.busy_us + first.idle_us == 2300 and second.busy_us + second.idle_us == 2600 - 200


def test_lanes_without_work_on_four_stages_by_hand() -> None:
    """Two of four lanes have a decode: in each round there is room for two more batches like them."""
    account = BubbleAccount(4, by_hand)
    for step in range(6):
        account.planned(plan(step, 0, 100, awaits=step - 2, spare=2))
        for stage in range(4):
            start = 400 * (step // 2) + 100 * (step % 2) + 100 * stage
            account.returned(stage, result(step, start, start + 100, 0 if step % 2 else 200))
    for stage in range(4):
        assert named(account, stage) == {"no_work": 400}


def test_a_lane_that_costs_more_by_hand() -> None:
    """Three lanes on four stages, one reads 900 tokens more: a fourth like the others would have filled 100."""
    account = BubbleAccount(4, by_hand)
    for step, kv_tokens in enumerate((1000, 100, 100)):
        account.planned(plan(step, 0, kv_tokens, spare=1))
    account.planned(plan(3, 0, 1000, awaits=0, spare=1))
    for step, (start, end) in enumerate(((0, 1000), (1000, 1100), (1100, 1200))):
        account.returned(0, result(step, start, end, 0))
    account.returned(0, result(3, 4000, 5000, 2800))
    assert named(account, 0) == {"no_work": 100, "pb3": 2700}


def test_a_wait_is_split_by_what_costs_more() -> None:
    account = BubbleAccount(2, by_hand)
    for step, (chunk, kv_tokens) in enumerate(((1, 5), (4, 15), (2, 90))):
        account.planned(plan(step, chunk, kv_tokens))
    for stage in range(2):
        account.returned(stage, result(0, 0, 10, 0))
    account.returned(0, result(1, 10, 20, 0))
    account.returned(1, result(1, 27, 37, 7))
    # 30 us of prefill and 10 of KV tokens more: 5.25 and 1.75, the larger remainder gets the microsecond.
    assert named(account, 1) == {"pb1": 5, "pb3": 2}
    account.returned(0, result(2, 20, 30, 0))
    account.returned(1, result(2, 47, 57, 10))
    # Less prefill, more KV tokens: all for those.
    assert named(account, 1) == {"pb1": 5, "pb3": 12}


@pytest.mark.parametrize(("before", "chunk", "cause"), [(9, 9, PB1), (9, 0, PB2), (0, 9, PB2), (0, 0, PB3)])
def test_a_wait_that_no_difference_explains_counts_by_what_the_batches_are(
    before: int, chunk: int, cause: int
) -> None:
    account = BubbleAccount(2, lambda batch: (0, 0))
    for step, tokens in enumerate((before, chunk)):
        account.planned(plan(step, tokens, 0 if tokens else 50))
        for stage in range(2):
            account.returned(stage, result(step, 0, 10, 33 * step * stage))
    assert named(account, 1) == {CAUSES[cause]: 33}


def test_one_stage_waits_for_nobody() -> None:
    account = BubbleAccount(1)
    for step, (dry, idle, starved) in enumerate(((0, 500, 500), (0, 30, 0), (0, 50, 20), (400, 450, 440))):
        account.planned(plan(step, 0, 9, awaits=step - 1, dry_us=dry))
        account.returned(0, result(step, 0, 10, idle, starved))
    assert named(account, 0) == {"plan_late": 30 + 50 + 50, "no_work": 400}
    assert account.accounts[0].late == 1, "after a drought no plan is late"


def test_steps_of_a_new_epoch_and_results_that_come_twice() -> None:
    account = BubbleAccount(2, by_hand)
    for epoch in range(2):
        account.begin()
        for step in range(2):
            account.planned(plan(step, 0, 10))
            for stage in range(2):
                for _ in range(2):
                    account.returned(stage, result(step, 0, 10, 7, 7))
        assert named(account, 0) == named(account, 1) == {"plan_late": 7 * (epoch + 1)}
    account.returned(0, result(9, 0, 10, 7, 7))
    assert account.accounts[0].iterations == 4, "what was never planned does not count"


def test_costs_of_a_time_model() -> None:
    model = TimeModel()
    costs = modelled_costs(model)
    batch = Batch(100, 5050.0, 8, 4000)
    assert costs(batch) == declared_costs(batch)
    draw = random.Random(1)
    for _ in range(3000):
        chunk, decodes = draw.randrange(400), draw.randrange(64)
        kv_tokens, attention = decodes * draw.randrange(1000), chunk * draw.randrange(4000)
        features = Features(chunk, attention, decodes, kv_tokens)
        model.learn(features, 1e-3 + 1e-5 * chunk + 1e-9 * attention + 2e-5 * decodes + 1e-8 * kv_tokens)
    prefill, decode = costs(batch)
    assert prefill == pytest.approx((1e-3 + 5e-6) * 1e12, rel=0.05)
    assert decode == pytest.approx((16e-5 + 4e-5) * 1e12, rel=0.05)


# ---- laws ----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**12), st.lists(st.integers(0, 10**9), min_size=1, max_size=6).filter(any))
def test_shares_add_up_and_are_within_one(total: int, weights: Sequence[int]) -> None:
    parts = apportion(total, weights)
    assert sum(parts) == total and all(part >= 0 for part in parts)
    for part, weight in zip(parts, weights, strict=True):
        assert abs(part * sum(weights) - total * weight) < sum(weights)
        assert weight or not part


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[list[SendPlan], list[list[Result]]]:
    """Plans, and what each stage says of each, on a pipeline with any delays and any durations."""
    stages, count = draw(st.integers(1, 4)), draw(st.integers(1, 16))
    times = st.integers(0, 2000)
    free = [0] * stages
    sends: list[SendPlan] = []
    results: list[list[Result]] = [[] for _ in range(stages)]
    received = 0
    for step in range(count):
        chunk, kv_tokens = draw(st.sampled_from([0, 1, 64, 500])), draw(st.sampled_from([0, 1, 900, 10**6]))
        awaits = draw(st.integers(max(-1, step - 2 * stages), step - 1))
        spare, dry = draw(st.integers(0, stages - 1)), draw(st.sampled_from([0, 0, 300, 10**5]))
        sends.append(plan(step, chunk, kv_tokens, awaits=awaits, spare=spare, dry_us=dry))
        received += draw(times)
        ready = 0
        for stage in range(stages):
            start = max(free[stage], received, ready) + draw(st.integers(0, 40))
            end = start + draw(times)
            idle = start - free[stage]
            results[stage].append(result(step, start, end, idle, min(idle, max(0, received - free[stage]))))
            free[stage], ready = end, end + draw(st.integers(0, 100))
    return sends, results


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(pipelines(), st.randoms(use_true_random=False))
def test_the_parts_are_the_idle_time_whatever_comes_first(
    made: tuple[list[SendPlan], list[list[Result]]], draw: random.Random
) -> None:
    sends, results = made
    stages = len(results)
    in_order, scrambled = BubbleAccount(stages), BubbleAccount(stages)
    for step, send in enumerate(sends):
        in_order.planned(send)
        for stage in range(stages):
            in_order.returned(stage, results[stage][step])
    # At most stages + 1 plans are out, and each stage tells its own in order.
    told, made_up = [0] * stages, 0
    while min(told) < len(sends):
        able = [stage for stage in range(stages) if told[stage] < made_up]
        if made_up < len(sends) and made_up - min(told) <= stages and (not able or draw.random() < 0.4):
            scrambled.planned(sends[made_up])
            made_up += 1
        elif able:
            stage = draw.choice(able)
            scrambled.returned(stage, results[stage][told[stage]])
            told[stage] += 1
    for stage, account in enumerate(in_order.accounts):
        assert min(account.causes) >= 0
        assert account.idle_us == sum(said.idle_us for said in results[stage][1:])
        assert account.busy_us == sum(said.ended_us - said.started_us for said in results[stage])
        assert account == scrambled.accounts[stage]
    assert all(named(in_order, stage).keys() <= {"plan_late", "no_work"} for stage in range(stages) if stages == 1)
