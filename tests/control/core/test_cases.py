"""Known failures of serving systems, by case id: the decision core must not have them."""

import random
from array import array
from itertools import pairwise

import pytest
from evenflow.control.core.events import Limits
from evenflow.control.core.sequence import Phase
from inprocess import InProcess
from shadow_server import advance, device_side, only, prompt, scrambled, shadow_server, wanted
from timed_device import TimedDevice
from virtual import VirtualPipeline


def chunks_of(server: InProcess, slot: int) -> list[tuple[int, int]]:
    """(step, tokens) of the chunks that plans gave to ``slot``."""
    found: list[tuple[int, int]] = []
    for sent in server.plans:
        slots, sizes = array("H", sent.plan.chunk_slots), array("I", sent.plan.chunk_tokens)
        found += [(sent.plan.step, n) for s, n in zip(slots, sizes, strict=True) if s == slot]
    return found


# ---- SCH-2: a short prompt behind a long one -----------------------------------------------------------------


def test_sch_2_short_prompt_starts_in_the_next_plan() -> None:
    server = shadow_server(budget=128)
    server.submit(0, prompt(4000), 4)
    advance(server, 7)
    before = len(server.plans)
    server.submit(1, prompt(20, seed=2), 4)
    slot = next(s.slot for s in [*only(server).waiting, *only(server).running] if s.key == 1)
    if slot < 0:  # both plans that may be out are out: it is in the next one
        advance(server, 3)
        slot = next(s.slot for s in only(server).running if s.key == 1)
    (first, size), *_ = chunks_of(server, slot)
    assert first <= before and size == 20
    long_chunks = [n for step, n in chunks_of(server, 0) if step <= first]
    assert long_chunks[-1] == 128 - 20, "what the share did not use goes back to the prefill in progress"
    server.run()
    assert server.tokens(0) == wanted(prompt(4000), 4) and server.tokens(1) == wanted(prompt(20, seed=2), 4)


@pytest.mark.parametrize("stages", [1, 4])
def test_sch_2_a_short_prompt_50_ms_after_a_long_one_has_its_first_token_long_before_it(
    stages: int,
) -> None:
    """An iteration of 128 tokens takes 13 ms on this device, the whole long prompt 0.4 s."""
    costs = (0.0005, 1e-4)
    device = TimedDevice(
        Limits(token_budget=128, max_num_seqs=16, max_model_len=8192, prefix_caching=False),
        lambda _stage, _now: lambda f: (costs[0] + costs[1] * (f.prefill + f.decodes)) / stages,
        stages=stages,
        noise=0.0,
    )
    device.submit(0, 4000, 4)
    device.submit(1, 20, 4, at=0.05)
    device.run(30.0)
    long, short = device.seen.requests[0], device.seen.requests[1]
    iteration = costs[0] + costs[1] * 128
    # Those that are out when it comes, its own, and the way through the stages.
    assert short.first - 0.05 <= (stages + 2) * iteration
    assert short.tokens == long.tokens == 4 and short.ended < long.first
    assert long.first <= 4020 / 128 * iteration + (stages + 2) * iteration, "nor is the long one held back by it"


@pytest.mark.parametrize("overtakes", [0, 3, 8])
def test_sch_2_blocked_head_is_overtaken_a_bounded_number_of_times(overtakes: int) -> None:
    server = shadow_server(budget=64, blocks=60, overtakes=overtakes, caching=False)
    server.submit(0, prompt(500), 200)  # 32 blocks, 44 at the end
    advance(server, 30)
    server.submit(1, prompt(600, seed=2), 4)  # 38 blocks: does not fit beside the first
    passed: list[int] = []
    key = 2
    while server.reason(1) is None:
        # Endless short ones: there is always one waiting.
        server.submit(key, prompt(10, seed=key), 2)
        key += 1
        advance(server, 6)
        head_waits = any(s.key == 1 for s in only(server).waiting)
        passed = [k for k in range(2, key) if server.reason(k)] if head_waits else passed
        assert key < 2000
    assert len(passed) == overtakes
    server.run()
    assert server.tokens(1) == wanted(prompt(600, seed=2), 4)
    server.assert_idle()


def test_sch_2_every_waiting_prompt_starts_within_as_many_plans_as_stand_before_it() -> None:
    """Long prompts before it cannot hold a short one back: each plan admits the next in order."""
    server = shadow_server(budget=64, blocks=1024)
    for key in range(6):
        server.submit(key, prompt(1000, seed=key), 2)
    server.submit(6, prompt(12, seed=9), 2)
    before = len(server.plans)
    while all(s.key != 6 for s in only(server).running):
        advance(server, 1)
    assert len(server.plans) - before <= 7
    server.run()
    server.assert_idle()


# ---- SCH-3: prompts longer than the budget -------------------------------------------------------------------


@pytest.mark.parametrize("block_size", [8, 16, 32])
@pytest.mark.parametrize("budget", [1, 7, 16, 17, 64, 250, 1000, 1001, 1002, 4096])
def test_sch_3_prompt_of_1001_tokens(budget: int, block_size: int) -> None:
    server = shadow_server(budget=budget, block_size=block_size, check=False)
    server.submit(0, prompt(1001), 12)
    server.run()
    assert server.tokens(0) == wanted(prompt(1001), 12)
    sizes = [n for _, n in chunks_of(server, 0)]
    assert sizes == [budget] * (1001 // budget) + ([1001 % budget] if 1001 % budget else [])
    server.assert_idle()


# ---- SCH-7: counters under chunks beside decodes -------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_sch_7_random_prompts_outputs_and_aborts(seed: int) -> None:
    """``InProcess`` checks every invariant after every event; the state machine in test_schedules goes further."""
    draw = random.Random(seed)
    budget = draw.choice([5, 16, 40])
    server = shadow_server(budget=budget, block_size=8, blocks=40, stages=1 + seed % 3, seqs=6)
    requests: dict[int, tuple[list[int], int]] = {}
    aborted: set[int] = set()
    for key in range(25):
        tokens, count = prompt(draw.randint(1, 3 * budget), seed=key), draw.randint(1, 20)
        requests[key] = tokens, count
        server.submit(key, tokens, count)
        for _ in range(draw.randint(0, 30)):
            if actions := server.actions():
                action, replica, stage = draw.choice(actions)
                action(replica, stage)
        if draw.random() < 0.3:
            victim = draw.randint(0, key)
            server.abort(victim)
            aborted.add(victim)
    server.run(scrambled(seed))
    for key, (tokens, count) in requests.items():
        if server.reason(key) == "abort":
            assert key in aborted and server.tokens(key) == wanted(tokens, count)[: len(server.tokens(key))]
        else:
            assert server.tokens(key) == wanted(tokens, count)
    server.assert_idle()
    for sent in server.plans:
        assert sent.tokens <= budget


def test_sch_7_only_the_final_chunk_samples() -> None:
    server = shadow_server(budget=16)
    server.submit(0, prompt(50), 1)
    steps = 0
    while server.actions():
        device_side(server)
        result = server.results[0][0]
        assert (len(result.ids) > 0) == (result.step == 3)
        server._return(0, 0)
        steps += 1
    assert steps == 4 and server.tokens(0) == wanted(prompt(50), 1)


# ---- KV-4, KV-5: prefix hits ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("shared", "hit"), [(15, 0), (16, 16), (17, 16), (31, 16), (32, 32)])
def test_kv_5_hits_are_exactly_the_full_blocks(shared: int, hit: int) -> None:
    server = shadow_server(block_size=16)
    first, second = prompt(40), prompt(shared) + prompt(20, seed=2)
    server.submit(0, first, 3)
    server.run()
    replica = only(server)
    assert (replica.cache_queries, replica.cache_hits) == (40, 0)
    server.submit(1, second, 3)
    server.run()
    assert server.clients[0].cached == {0: 0, 1: hit}
    assert (replica.cache_queries, replica.cache_hits) == (40 + len(second), hit)
    computed = sum(n for _, n in chunks_of(server, 0))
    assert computed == 40 + len(second) - hit, "what was hit is not computed again"
    assert server.tokens(1) == wanted(second, 3)
    server.assert_idle()


def test_kv_5_nothing_is_hit_with_the_cache_off() -> None:
    server = shadow_server(caching=False)
    for key in range(2):
        server.submit(key, prompt(64), 3)
        server.run()
    assert server.clients[0].cached == {0: 0, 1: 0} and only(server).cache_hits == 0
    assert len(only(server).pool.free) == only(server).pool.num_blocks


def test_kv_4_other_salts_never_hit() -> None:
    server = shadow_server()
    text = prompt(500)
    for key, salt in enumerate([b"a", b"b", b"", b"a", b"b"]):
        server.submit(key, text, 2, salt=salt)
        server.run()
    assert server.clients[0].cached == {0: 0, 1: 0, 2: 0, 3: 496, 4: 496}
    assert all(server.tokens(key) == wanted(text, 2) for key in range(5))


# ---- KV-6: references ----------------------------------------------------------------------------------------


def test_kv_6_twins_then_preemption_then_a_full_pool() -> None:
    server = shadow_server(blocks=12, block_size=16, budget=256, up=False)
    twin = prompt(40)
    server.submit(0, twin, 60)  # 100 tokens, 7 blocks: both together do not fit
    server.submit(1, twin, 60)
    server.bring_up(0)
    registered = server.plans[0].registers
    assert len({block for r in registered for block in array("I", r.blocks)}) == 6, "twins in one batch do not share"
    replica = only(server)
    server.run()
    assert replica.preemptions >= 1
    for key in range(2, 8):  # fill the pool again and again, over whatever the cache kept
        server.submit(key, prompt(150, seed=key), 20)
    server.submit(8, twin, 20)
    server.run(scrambled(3))
    for key in (0, 1):
        assert server.tokens(key) == wanted(twin, 60)
    for key in range(2, 8):
        assert server.tokens(key) == wanted(prompt(150, seed=key), 20)
    assert server.tokens(8) == wanted(twin, 20)
    server.assert_idle()


def test_kv_6_a_hit_that_cannot_be_admitted_holds_nothing() -> None:
    server = shadow_server(blocks=12, block_size=16)
    server.submit(0, prompt(48), 2)
    server.run()
    pool = only(server).pool
    cached = pool.evictable
    assert cached >= 3
    server.submit(1, prompt(100, seed=2), 40)
    server.submit(2, prompt(48) + prompt(60, seed=3), 4)  # 3 blocks hit, 4 new: too much beside the first
    assert [s.key for s in only(server).waiting] == [2]
    assert not only(server).waiting.head().table and pool.evictable >= 3
    server.run()
    assert server.tokens(2) == wanted(prompt(48) + prompt(60, seed=3), 4)
    server.assert_idle()


# ---- PRE: the pool is smaller than what is asked -------------------------------------------------------------


def test_pre_1_a_prompt_larger_than_the_pool_is_refused_at_once() -> None:
    server = shadow_server(blocks=20, block_size=16)
    server.submit(0, prompt(400), 4)
    (refused,) = server.rejected
    assert (refused.code, refused.field) == ("too_long", "tokens")
    assert "400 tokens" in refused.message and "block pool" in refused.message and "320" in refused.message
    server.submit(1, prompt(2, seed=2), 4)
    server.run()
    assert server.tokens(1) == wanted(prompt(2, seed=2), 4)


def test_pre_1_output_is_capped_by_the_pool() -> None:
    server = shadow_server(blocks=20, block_size=16)
    server.submit(0, prompt(300), 100)
    server.run()
    assert server.reason(0) == "length" and server.tokens(0) == wanted(prompt(300), 21)
    server.assert_idle()


@pytest.mark.parametrize("count", [2, 5])
@pytest.mark.parametrize("stages", [1, 2])
def test_pre_3_progress_when_each_needs_most_of_the_pool(count: int, stages: int) -> None:
    server = shadow_server(blocks=20, block_size=16, budget=64, stages=stages, caching=False)
    for key in range(count):
        server.submit(key, prompt(100, seed=key), 92)  # 192 tokens: 12 of 20 blocks
    most_running = 0
    while actions := server.actions():
        action, replica, stage = actions[-1]
        action(replica, stage)
        most_running = max(most_running, len(only(server).running))
    for key in range(count):
        assert server.tokens(key) == wanted(prompt(100, seed=key), 92)
    assert 1 <= only(server).preemptions <= most_running * count
    assert only(server).preemptions / count <= most_running
    server.assert_idle()


def test_pre_5_nothing_leaks_over_500_requests() -> None:
    draw = random.Random(5)
    server = shadow_server(blocks=24, block_size=8, budget=48, stages=2, seqs=12, check=False)
    requests: dict[int, tuple[list[int], int, int]] = {}
    invalid = 0
    for key in range(500):
        owner = key % 3
        kind = draw.random()
        if kind < 0.1:
            server.submit(key, prompt(draw.choice([193, 300])), 4, owner=owner)  # more than the pool
            del server.clients[owner].tokens[key]
            invalid += 1
            continue
        requests[key] = prompt(draw.randint(1, 40), seed=draw.randint(0, 20)), draw.randint(1, 30), owner
        server.submit(key, requests[key][0], requests[key][1], owner=owner)
        for _ in range(draw.randint(0, 25)):
            if actions := server.actions():
                action, replica, stage = draw.choice(actions)
                action(replica, stage)
        if kind < 0.4:
            victim = draw.choice(list(requests))
            server.abort(victim, requests[victim][2])
    server.run(scrambled(5))
    assert len(server.rejected) == invalid > 20
    reasons = [server.reason(key, owner) for key, (_, _, owner) in requests.items()]
    assert reasons.count("abort") > 20 and reasons.count("length") > 200
    for key, (tokens, count, owner) in requests.items():
        got = server.tokens(key, owner)
        assert got == wanted(tokens, count)[: len(got)]
    replica = only(server)
    assert replica.preemptions > 10
    server.assert_idle()
    assert not server.engine._homes
    assert not any(server.fanout.owned_by(owner) for owner in server.clients)
    assert sorted(replica.free_slots) == list(range(server.num_slots)) and not any(replica.owners)


# ---- PP: pipelines -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stages", [2, 4])
def test_pp_1_a_thousand_requests_at_once(stages: int) -> None:
    server = shadow_server(stages=stages, budget=256, blocks=400, seqs=128, check=False)
    requests = [(prompt(1 + (key * 37) % 60, seed=key), 1 + key % 5) for key in range(1000)]
    for key, (tokens, count) in enumerate(requests):
        server.submit(key, tokens, count)
    server.run(scrambled(stages))
    for key, (tokens, count) in enumerate(requests):
        assert server.tokens(key) == wanted(tokens, count)  # what one stage gives: see the case below
    server.assert_idle()


def test_pp_1_one_stage_gives_what_is_wanted() -> None:
    server = shadow_server(budget=256, blocks=400, seqs=128, check=False)
    requests = [(prompt(1 + (key * 37) % 60, seed=key), 1 + key % 5) for key in range(1000)]
    for key, (tokens, count) in enumerate(requests):
        server.submit(key, tokens, count)
    server.run()
    assert all(server.tokens(key) == wanted(tokens, count) for key, (tokens, count) in enumerate(requests))


def test_pp_2_stages_are_busy_in_virtual_time() -> None:
    stages, step_s = 4, 0.020
    server = shadow_server(stages=stages, budget=64, blocks=1024, caching=False)
    pipeline = VirtualPipeline(server, lambda stage, tokens: step_s)
    for key in range(16):
        server.submit(key, prompt(8 * 64, seed=key), 40)
    pipeline.run()
    for key in range(16):
        assert server.tokens(key) == wanted(prompt(8 * 64, seed=key), 40)
    # Steady: from when the pipeline has filled until fewer requests than stages are left.
    steady = (stages * step_s, next(when for when, _, left in pipeline.history if left < stages))
    for stage in range(stages):
        assert pipeline.busy_share(stage, *steady) >= 0.85
    inside = [plans for when, plans, _ in pipeline.history if steady[0] <= when < steady[1]]
    assert min(inside) >= stages and max(inside) <= stages + 1
    # The next chunk of a prompt enters the first stage before the one before it leaves the last.
    runs = {(run.stage, run.step): run for run in pipeline.runs}
    steps = [step for step, _ in chunks_of(server, 0)]
    overlapping = [
        runs[0, later].started < runs[stages - 1, earlier].ended
        for earlier, later in pairwise(steps)
        if later - earlier < stages
    ]
    assert len(overlapping) >= 7 and all(overlapping)


def test_pp_2_decodes_are_spread_over_the_lanes() -> None:
    server = shadow_server(stages=4, budget=256)
    for key in range(16):
        server.submit(key, prompt(10, seed=key), 20)
    advance(server, 100)
    assert [lane.count for lane in only(server).lanes] == [4, 4, 4, 4]
    server.run()
    server.assert_idle()


# ---- CAN-2: aborts at any moment -----------------------------------------------------------------------------


def test_can_2_abort_between_stages() -> None:
    server = shadow_server(stages=2)
    server.submit(0, prompt(20), 10)
    server.submit(1, prompt(21, seed=2), 10)
    server._run_stage(0, 0)
    server.abort(0)
    assert server.reason(0) == "abort" and server.tokens(0) == []
    server.run()
    assert server.tokens(0) == [] and server.tokens(1) == wanted(prompt(21, seed=2), 10)
    server.assert_idle()


def test_can_2_no_later_plan_names_an_aborted_request() -> None:
    server = shadow_server(stages=2)
    server.submit(0, prompt(20), 50)
    server.submit(1, prompt(20, seed=2), 50)
    advance(server, 40)
    seq = server.engine.requests[0][0]
    slot, before = seq.slot, len(server.plans)
    assert seq.phase is Phase.DECODE
    server.abort(0)
    advance(server, 8)
    later = [sent.plan for sent in server.plans[before:]]
    assert later and slot in array("H", later[0].released)
    for plan in later:
        decodes = plan.decodes
        assert slot >> 3 >= len(decodes) or not decodes[slot >> 3] >> (slot & 7) & 1
    server.run()
    assert server.tokens(1) == wanted(prompt(20, seed=2), 50)
    server.assert_idle()


def test_can_2_abort_before_the_first_schedule() -> None:
    server = shadow_server(seqs=1)
    server.submit(0, prompt(20), 10)
    server.submit(1, prompt(20, seed=2), 10)
    assert [s.key for s in only(server).waiting] == [1]
    server.abort(1)
    assert server.reason(1) == "abort"
    server.run()
    assert server.tokens(0) == wanted(prompt(20), 10)
    server.assert_idle()


def test_can_2_abort_without_a_replica() -> None:
    server = shadow_server(up=False)
    server.submit(0, prompt(20), 10)
    server.submit(1, prompt(20), 10)
    server.abort(0)
    assert server.reason(0) == "abort"
    server.bring_up(0)
    server.run()
    assert server.tokens(1) == wanted(prompt(20), 10)
    server.assert_idle()


def test_can_2_abort_twice_and_after_the_end() -> None:
    server = shadow_server(stages=2)
    for key in range(2):
        server.submit(key, prompt(20, seed=key), 5)
    advance(server, 3)
    server.abort(0)
    server.abort(0)
    server.run()
    server.abort(0)
    server.abort(1)
    server.abort(77)
    server.abort(0, owner=5)
    assert (server.reason(0), server.reason(1)) == ("abort", "length")
    assert server.tokens(1) == wanted(prompt(20, seed=1), 5)
    server.assert_idle()


def test_can_2_the_key_of_an_aborted_request_may_be_used_again() -> None:
    """While results that name the old one are still on their way."""
    server = shadow_server(stages=2)
    server.submit(0, prompt(20), 10)
    server._run_stage(0, 0)
    server.abort(0)
    del server.clients[0].ended[0]
    server.submit(0, prompt(33, seed=2), 6)
    server.run()
    assert server.tokens(0) == wanted(prompt(33, seed=2), 6)
    server.assert_idle()


def test_the_queue_is_bounded_by_tokens_too() -> None:
    """One request runs, one of 100 tokens waits; a third would be too many tokens, a continuation is taken."""
    server = shadow_server(budget=64, block_size=16, blocks=64, seqs=1, max_queued_tokens=150)
    for key in range(2):
        server.submit(key, prompt(100, key + 1), 4)
    server.submit(2, prompt(60, 3), 4)
    assert [(r.key, r.code) for r in server.rejected] == [(2, "overloaded")] and "100 tokens" in server.rejected[
        0
    ].message
    del server.clients[0].tokens[2]
    server.submit(3, prompt(60, 4), 4, received=wanted(prompt(60, 4), 4)[:1])
    server.run()
    assert [server.reason(key) for key in (0, 1, 3)] == ["length"] * 3
    server.assert_idle()
