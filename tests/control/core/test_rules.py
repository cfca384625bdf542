"""Rules that a prototype of the decision core found necessary: each with a schedule written by hand."""

import os
import subprocess
import sys
from array import array
from pathlib import Path
from typing import Any

import pytest
from evenflow.control.build_core import build
from evenflow.control.core.engine import FATAL_DEATHS, Engine
from evenflow.control.core.events import (
    Aborted,
    Delivered,
    Effect,
    Event,
    Limits,
    OutOfStep,
    Rejected,
    ReplicaLost,
    ReplicaUp,
    Returned,
    SendPlan,
    Submitted,
)
from evenflow.control.core.integrity import check_integrity
from evenflow.control.core.sequence import Phase
from evenflow.control.core.vocabulary import too_large
from evenflow.control.wire import Result, Submit, decode_from_client, decode_to_worker, encode
from evenflow.dataplane.simulated.shadow import shadow_tokens
from hypothesis import given
from hypothesis import strategies as st
from inprocess import InProcess, u32
from shadow_server import advance, device_side, only, prompt, scrambled, shadow_server, wanted


def result_of(server: InProcess) -> Result:
    """Let the device side run; the oldest result on its way to control."""
    device_side(server)
    return server.results[0][0]


# ---- results -------------------------------------------------------------------------------------------------


def test_a_result_of_an_older_epoch_is_dropped_though_its_step_matches() -> None:
    server = shadow_server()
    server.submit(0, prompt(10), 8)
    late = result_of(server)
    server.crash(0)
    server.bring_up(0)
    replica = only(server)
    assert replica.inflight[0].step == late.step == 0 and late.epoch != replica.epoch
    plans = len(server.plans)
    server.step(Returned(0, late))
    assert server.tokens(0) == [] and replica.inflight[0].step == 0 and len(server.plans) == plans
    server.run()
    assert server.tokens(0) == wanted(prompt(10), 8)
    server.assert_idle()


def test_a_result_without_a_replica_is_dropped() -> None:
    server = shadow_server()
    server.submit(0, prompt(10), 8)
    late = result_of(server)
    server.crash(0)
    assert server.engine.step(Returned(0, late), 0.0) == []


def test_duplicated_results_are_ignored() -> None:
    server = shadow_server(stages=2)
    server.submit(0, prompt(10), 8)
    for _ in range(100):
        if not server.actions():
            break
        result = result_of(server)
        server._return(0, 0)
        taken, plans = list(server.tokens(0)), len(server.plans)
        server.step(Returned(0, result))
        assert server.tokens(0) == taken and len(server.plans) == plans
    assert server.tokens(0) == wanted(prompt(10), 8)
    server.assert_idle()


def test_a_gap_in_the_results_is_reported_and_changes_nothing() -> None:
    engine = Engine(Limits())
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    engine.step(Submitted(0, Submit(1, "r", u32(prompt(10)), 10, 8)), 0.0)
    second = Result(1, 1, 0, 0, 0, 0, 0, ids=u32([7]))
    (effect,) = engine.step(Returned(0, second), 0.0)
    assert isinstance(effect, OutOfStep) and "step 1, expected 0" in effect.reason
    check_integrity(engine)


@pytest.mark.parametrize("ids", [b"", b"abc", u32([1] * 17)], ids=["none", "odd", "too many"])
def test_ids_that_do_not_cover_the_rows_are_reported(ids: bytes) -> None:
    engine = Engine(Limits())
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    engine.step(Submitted(0, Submit(1, "r", u32(prompt(10)), 10, 8)), 0.0)
    (effect,) = engine.step(Returned(0, Result(1, 0, 0, 0, 0, 0, 0, ids=ids)), 0.0)
    assert isinstance(effect, OutOfStep)
    check_integrity(engine)


@pytest.mark.parametrize("fields", [{"lane": 1}, {"stopped": b"\0"}, {"stopped": b"\0\0\1"}], ids=str)
def test_sec_1_a_result_that_contradicts_itself_or_the_plan_is_reported(fields: dict[str, Any]) -> None:
    engine = Engine(Limits())
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    engine.step(Submitted(0, Submit(1, "r", u32(prompt(10)), 10, 8)), 0.0)
    result = Result(
        **{
            **dict.fromkeys(("received_us", "started_us", "ended_us", "idle_us"), 0),
            "epoch": 1,
            "step": 0,
            "lane": 0,
            "ids": u32([7]),
            **fields,
        }
    )
    (effect,) = engine.step(Returned(0, result), 0.0)
    assert isinstance(effect, OutOfStep) and "step 0" in effect.reason
    check_integrity(engine)


def test_sec_1_a_sequence_that_is_said_to_have_stopped_twice_ends_once() -> None:
    engine = Engine(Limits())
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    engine.step(Submitted(0, Submit(1, "r", u32(prompt(10)), 10, 8)), 0.0)
    effects = engine.step(Returned(0, Result(1, 0, 0, 0, 0, 0, 0, ids=u32([7]), stopped=b"\0\0" * 3)), 0.0)
    ends = [ended for effect in effects if isinstance(effect, Delivered) for ended in effect.ends]
    assert [ended.reason for ended in ends] == ["stop"] and not engine.requests
    check_integrity(engine)


def test_sec_1_what_a_worker_is_told_of_the_most_that_a_client_may_say_is_a_message() -> None:
    """Else the worker refuses the plan, and the epoch is lost to everybody."""
    engine = Engine(Limits())
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    submit = Submit(1, "r" * 256, u32(prompt(10)), 10, 1 << 21, stop_ids=tuple(range(64)), min_tokens=1 << 21)
    plan, *_ = engine.step(Submitted(0, decode_from_client(encode(submit))), 0.0)
    assert isinstance(plan, SendPlan)
    (register,) = plan.registers
    assert decode_to_worker(encode(register)) == register and register.min_len == 1 << 21


# ---- what a worker must not be given -------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [1, 200, 256, 257, 49_152, 65_536, 128_256, 1 << 24, (1 << 32) - 1])
@given(data=st.data())
def test_the_largest_id_is_found_whatever_the_vocabulary(vocab: int, data: st.DataObject) -> None:
    near = st.integers(max(0, vocab - 3), min(vocab + 300, (1 << 32) - 1))
    ids = data.draw(st.lists(st.integers(0, vocab - 1) | near | st.integers(0, (1 << 32) - 1), min_size=1))
    assert too_large(u32(ids), vocab) == (max(ids) if max(ids) >= vocab else None)


def test_sec_1_ids_that_the_model_does_not_have_are_refused() -> None:
    engine = Engine(Limits(vocab_size=49_152))
    for ids, prompt_len in (([1, 49_152, 2], 3), ([1, 2, (1 << 32) - 1], 2)):
        (effect,) = engine.step(Submitted(0, Submit(1, "r", u32(ids), prompt_len, 8)), 0.0)
        assert isinstance(effect, Rejected) and (effect.code, effect.field) == ("invalid", "tokens")
        assert effect.message == f"token ids must be from 0 to 49151, not {max(ids)}"
    assert engine.step(Submitted(0, Submit(1, "r", u32([0, 49_151]), 2, 8)), 0.0) == []


# ---- sequences that only wait for their last result ----------------------------------------------------------


def settling_server() -> InProcess:
    """One request, in no lane and no queue: its last token is being sampled."""
    server = shadow_server(stages=2)
    server.submit(0, prompt(10), 4)
    while not only(server).settling:
        advance(server, 1)
    (seq,) = only(server).settling
    assert seq.phase is Phase.SETTLING and seq.lane is None and not only(server).running
    return server


def test_recovery_takes_what_only_waits_for_its_last_result() -> None:
    server = settling_server()
    assert len(server.tokens(0)) < 4
    server.crash(0)
    check_integrity(server.engine)
    server.bring_up(0)
    server.run()
    assert server.tokens(0) == wanted(prompt(10), 4) and server.reason(0) == "length"
    server.assert_idle()


def test_abort_finds_what_only_waits_for_its_last_result() -> None:
    server = settling_server()
    server.abort(0)
    assert server.reason(0) == "abort" and not only(server).settling
    got = list(server.tokens(0))
    server.run()
    assert server.tokens(0) == got == wanted(prompt(10), 4)[: len(got)]
    server.assert_idle()


# ---- preemption ----------------------------------------------------------------------------------------------


def crossing_server(stop_ids: tuple[int, ...] = ()) -> InProcess:
    """Two requests that decode in a pool of five blocks of eight; the second has results in flight when the first
    takes its block."""
    server = shadow_server(blocks=5, block_size=8, caching=False, up=False)
    server.submit(0, prompt(14), 20)
    server.submit(1, prompt(14, seed=2), 20, stop_ids=stop_ids)
    server.bring_up(0)
    while not only(server).preemptions:
        device_side(server)
        server._return(0, 0)
    return server


def test_a_preempted_sequence_is_readmitted_only_after_its_results_in_flight() -> None:
    server = crossing_server()
    replica = only(server)
    (seq,) = replica.settling
    assert seq.key == 1 and seq.pending > 0 and not seq.table
    while seq.pending:
        assert seq.phase is Phase.SETTLING and seq not in replica.waiting
        device_side(server)
        server._return(0, 0)
    assert seq.phase is Phase.WAITING and seq in replica.waiting
    assert seq.known - 14 == len(server.tokens(1)), "results in flight count"
    server.run()
    assert server.tokens(0) == wanted(prompt(14), 20) and server.tokens(1) == wanted(prompt(14, seed=2), 20)
    server.assert_idle()


def test_a_result_in_flight_may_stop_a_preempted_sequence() -> None:
    probe = crossing_server()
    (seq,) = only(probe).settling
    held = seq.known - 14
    output = wanted(prompt(14, seed=2), 20)
    assert output[held] not in output[:held]
    server = crossing_server(stop_ids=(output[held],))
    (seq,) = only(server).settling
    assert seq.phase is Phase.SETTLING and server.reason(1) is None
    device_side(server)
    server._return(0, 0)
    assert server.reason(1) == "stop" and not only(server).settling and not only(server).waiting
    server.run()
    assert server.tokens(1) == output[: held + 1] and server.tokens(0) == wanted(prompt(14), 20)
    server.assert_idle()


def test_a_preempted_sequence_may_be_aborted_at_once() -> None:
    server = crossing_server()
    server.abort(1)
    assert server.reason(1) == "abort"
    server.run()
    got = server.tokens(1)
    assert got == wanted(prompt(14, seed=2), 20)[: len(got)] and server.tokens(0) == wanted(prompt(14), 20)
    server.assert_idle()


def test_the_last_in_admission_order_is_preempted() -> None:
    server = shadow_server(blocks=8, block_size=8, caching=False, up=False)
    for key in range(3):
        server.submit(key, prompt(15, seed=key), 30)
    server.bring_up(0)
    order: list[int] = []
    while server.actions():
        advance(server, 1)
        for seq in [*only(server).settling, *only(server).waiting]:
            if seq.computed < seq.max_len - 1 and seq.key not in order:
                order.append(seq.key)
    assert order == [2, 1]
    assert [server.tokens(key) for key in range(3)] == [wanted(prompt(15, seed=key), 30) for key in range(3)]


# ---- admission -----------------------------------------------------------------------------------------------


def test_the_watermark_does_not_apply_when_nothing_holds_blocks() -> None:
    server = shadow_server(blocks=10, block_size=8)
    assert only(server).watermark == 1
    server.submit(0, prompt(80), 1)
    assert [s.key for s in [*only(server).running, *only(server).settling]] == [0]
    server.run()
    assert server.tokens(0) == wanted(prompt(80), 1)
    server.assert_idle()


def test_the_watermark_applies_beside_others() -> None:
    server = shadow_server(blocks=10, block_size=8, caching=False, up=False)
    server.submit(0, prompt(37), 4)
    server.submit(1, prompt(37, seed=2), 4)  # would leave no block
    server.submit(2, prompt(29, seed=3), 4)  # leaves one
    server.bring_up(0)
    assert [s.key for s in only(server).running] == [0, 2] and [s.key for s in only(server).waiting] == [1]
    server.run()
    server.assert_idle()


@pytest.mark.parametrize("size", [16, 17, 31, 32, 33, 64])
def test_at_least_one_token_is_always_computed(size: int) -> None:
    server = shadow_server(block_size=16)
    for key in range(2):
        server.submit(key, prompt(size), 2)
        server.run()
    assert server.clients[0].cached[1] == (size - 1) // 16 * 16
    assert server.tokens(1) == wanted(prompt(size), 2)


def test_a_hit_is_not_also_counted_as_what_can_be_evicted() -> None:
    server = shadow_server(blocks=10, block_size=8)
    server.submit(0, prompt(64), 1)
    server.run()
    pool = only(server).pool
    assert pool.evictable == 8 and len(pool.free) == 2
    server.submit(1, prompt(15, seed=2), 30)  # takes the two free blocks
    server.submit(2, prompt(64) + prompt(7, seed=3), 2)  # eight hits, and one that only the hits could give
    assert [s.key for s in only(server).waiting] == [2]
    server.run()
    assert server.tokens(2) == wanted(prompt(64) + prompt(7, seed=3), 2)
    server.assert_idle()


def test_twins_in_one_batch_do_not_share_but_later_ones_do() -> None:
    server = shadow_server(block_size=16, up=False)
    for key in range(2):
        server.submit(key, prompt(40), 6)
    server.bring_up(0)
    first, second = server.plans[0].registers
    assert not set(array("I", first.blocks)) & set(array("I", second.blocks))
    assert (first.computed, second.computed) == (0, 0)
    server.submit(2, prompt(40), 6)
    server.run()
    third = next(r for sent in server.plans[1:] for r in sent.registers)
    assert third.computed == 32 and array("I", third.blocks)[:2] == array("I", first.blocks)[:2]
    assert [server.tokens(key) for key in range(3)] == [wanted(prompt(40), 6)] * 3
    server.assert_idle()


def test_a_block_is_named_when_the_plan_that_fills_it_is_made() -> None:
    """A twin that comes while the prompt is being read hits what is read, and nothing of the rest."""
    server = shadow_server(budget=16, block_size=16)
    server.submit(0, prompt(200), 2)
    read = sum(sent.tokens for sent in server.plans)
    assert read == 32
    server.submit(1, prompt(200), 2)
    while all(r.slot == 0 for sent in server.plans for r in sent.registers):
        read = sum(sent.tokens for sent in server.plans)
        advance(server, 1)
    twin = next(r for sent in server.plans for r in sent.registers if r.slot == 1)
    assert twin.computed == read // 16 * 16 < 192
    server.run()
    assert server.tokens(0) == server.tokens(1) == wanted(prompt(200), 2)
    server.assert_idle()


# ---- slots ---------------------------------------------------------------------------------------------------


def test_a_slot_is_not_used_again_while_a_plan_that_names_it_is_out() -> None:
    server = shadow_server(seqs=1, num_slots=2)
    for key in range(3):
        server.submit(key, prompt(10, seed=key), 4)
    while server.actions():
        named = {slot for record in only(server).inflight for slot in record.fenced}
        for sent in server.plans[-1:]:
            assert not named & {r.slot for r in sent.registers}
        advance(server, 1)
    assert [server.tokens(key) for key in range(3)] == [wanted(prompt(10, seed=key), 4) for key in range(3)]


# ---- a request that kills workers ----------------------------------------------------------------------------


def dies(server: InProcess, poison: int) -> bool:
    """Run until the first stage's next batch has the poison; true if it has."""
    while actions := server.actions():
        action, replica, stage = actions[-1]
        head = server.replicas[0].executors[0]._queue
        if action == server._run_stage and stage == 0 and head:
            table = server.replicas[0].executors[0]._table
            assert table is not None and head[0].batch is not None
            table.fill_inputs(head[0].batch)
            ids = head[0].batch.ids
            assert ids is not None
            if (ids == poison).any():
                return True
        action(replica, stage)
    return False


@pytest.mark.parametrize("stages", [1, 2])
def test_a_request_that_kills_three_workers_fails_and_the_others_go_on(stages: int) -> None:
    poison = 49_999  # no prompt has it
    server = shadow_server(stages=stages)
    requests = {key: prompt(12, seed=key) for key in range(5)}
    requests[2] = [*prompt(11, seed=2), poison]
    for key, tokens in requests.items():
        server.submit(key, tokens, 30)
    deaths = 0
    while dies(server, poison):
        deaths += 1
        if deaths == FATAL_DEATHS:
            assert [s.key for s in only(server).running] == [2], "the third time it runs alone"
        assert deaths <= FATAL_DEATHS
        server.crash(0)
        server.bring_up(0)
    assert deaths == FATAL_DEATHS
    reason, message = server.clients[0].ended[2]
    assert reason == "error" and "died 3 times" in message and server.tokens(2) == []
    for key, tokens in requests.items():
        if key != 2:
            assert server.tokens(key) == wanted(tokens, 30) and server.reason(key) == "length"
    server.assert_idle()


@pytest.mark.parametrize("stages", [1, 2])
def test_a_death_is_blamed_on_the_plan_behind_a_result_that_died_too(stages: int) -> None:
    """A worker launches a plan before it tells of the last: what seems to wait may be what killed it."""
    server = shadow_server(stages=stages)
    server.submit(0, prompt(12), 60)
    advance(server, 8)
    server.submit(1, prompt(12, seed=2), 5)
    seq = server.engine.requests[0][1]
    waiting = list(only(server).inflight)[stages:]
    while not any(seq in record.finals for record in waiting):
        advance(server, 1)
        waiting = list(only(server).inflight)[stages:]
    server.crash(0)
    assert seq.deaths == 1


def test_a_suspect_that_outlives_its_doubt_is_trusted_again() -> None:
    server = shadow_server()
    for key in range(3):
        server.submit(key, prompt(12, seed=key), 60)
    for _ in range(2):  # two deaths that none of them is to blame for
        advance(server, 6)
        server.crash(0)
        server.bring_up(0)
    suspects = [seq for seq in server.engine.requests[0].values() if seq.deaths == 2]
    assert suspects and len(only(server).running) == 1
    while any(seq.deaths for seq in suspects):
        assert len(only(server).running) <= 1
        advance(server, 1)
        if not server.actions():
            break
    assert not any(seq.deaths for seq in suspects)
    server.run()
    assert [server.tokens(key) for key in range(3)] == [wanted(prompt(12, seed=key), 60) for key in range(3)]
    server.assert_idle()


def test_an_aborted_suspect_lets_the_others_in() -> None:
    server = shadow_server()
    server.submit(0, prompt(12), 60)
    for _ in range(2):
        server.crash(0)
        server.bring_up(0)
    server.submit(1, prompt(12, seed=1), 5)
    assert [s.key for s in only(server).running] == [0] and [s.key for s in only(server).waiting] == [1]
    server.abort(0)
    server.run()
    assert server.tokens(1) == wanted(prompt(12, seed=1), 5)
    server.assert_idle()


# ---- several replicas ----------------------------------------------------------------------------------------


def test_the_others_take_over_what_a_lost_replica_ran() -> None:
    server = shadow_server(replicas=2)
    for key in range(6):
        server.submit(key, prompt(20, seed=key), 20)
    assert {len(r.running) + len(r.waiting) for r in server.engine.replicas.values()} == {3}
    advance(server, 12)
    server.crash(0)
    server.run()
    assert [server.tokens(key) for key in range(6)] == [wanted(prompt(20, seed=key), 20) for key in range(6)]
    server.assert_idle()


def test_a_request_that_no_replica_left_has_room_for_is_capped_or_ends() -> None:
    """Replicas may have pools of different sizes: what ran in the large one must not wait for ever for the small."""
    engine = Engine(Limits(max_model_len=1000, block_size=16))
    engine.step(ReplicaUp(0, 1, 1, 64, 16), 0.0)
    engine.step(Submitted(0, Submit(1, "long", u32(prompt(500)), 500, 100)), 0.0)
    engine.step(Submitted(0, Submit(2, "grows", u32(prompt(100)), 100, 400)), 0.0)
    engine.step(ReplicaUp(1, 2, 1, 10, 16), 0.0)
    effects = engine.step(ReplicaLost(0), 0.0)
    ends = [e for effect in effects if isinstance(effect, Delivered) for e in effect.ends if e.reason == "error"]
    assert [e.seq.key for e in ends] == [1] and "161 tokens" in ends[0].message
    assert engine.requests[0][2].max_len == 161
    check_integrity(engine)


# ---- determinism ---------------------------------------------------------------------------------------------


def written(effects: list[Effect]) -> list[bytes]:
    """Effects as bytes."""
    found: list[bytes] = []
    for effect in effects:
        if isinstance(effect, SendPlan):
            found += [encode(message) for message in [*effect.registers, effect.plan]]
            found.append(repr((effect.digest, effect.tokens, effect.decodes, effect.kv_tokens)).encode())
        elif isinstance(effect, Delivered):
            ends = [(e.seq.key, e.slot, e.reason, e.message) for e in effect.ends]
            starts = [(slot, seq.key) for slot, seq in effect.starts]
            found += [bytes(effect.live), bytes(effect.ids), repr((effect.step, effect.sole, starts, ends)).encode()]
        else:
            found.append(repr(effect).encode())
    return found


def recorded() -> tuple[InProcess, list[Event], list[bytes]]:
    """A run with preemptions, aborts and a lost replica: what the engine was given, and what it did about it."""
    server = shadow_server(stages=2, replicas=2, blocks=12, block_size=8, budget=40, seqs=8, check=False)
    events: list[Event] = [ReplicaUp(r, server.epochs[r], 2, 12, server.num_slots) for r in range(2)]
    effects: list[bytes] = []
    step = server.decide

    def recording(event: Event, now: float) -> list[Effect]:
        events.append(event)
        done = step(event, now)
        effects.extend(written(done))
        return done

    server.decide = recording
    for key in range(20):
        server.submit(key, prompt(5 + 3 * key, seed=key % 7), 5 + key, owner=key % 3)
        advance(server, 5)
        if key % 6 == 5:
            server.abort(key - 2, (key - 2) % 3)
        if key == 12:
            server.crash(1)
        if key == 15:
            server.bring_up(1)
    server.run(scrambled(4))
    return server, events, effects


def test_same_events_give_the_same_effects_byte_for_byte() -> None:
    """Recorded, then replayed into a new engine."""
    server, events, effects = recorded()
    assert any(isinstance(event, Aborted) for event in events) and len(effects) > 500
    assert server.engine.counters["preemptions"] + sum(r.preemptions for r in server.engine.replicas.values())
    again = Engine(server.limits)
    replayed = [data for event in events for data in written(again.step(event, 123.0))]
    assert replayed[-len(effects) :] == effects


def test_the_compiled_core_decides_like_the_interpreted_one() -> None:
    try:
        build()
        can_build = True
    except RuntimeError:  # no compiler here: the interpreted core serves
        can_build = False
    code = (
        "import hashlib, evenflow.control.core.replica as core; from test_rules import recorded;"
        "print(core.__file__, hashlib.sha256(b''.join(recorded()[2])).hexdigest())"
    )
    said: list[tuple[str, str]] = []
    for pure in ("0", "1"):
        environment = os.environ | {"EVENFLOW_PURE": pure}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), *sys.path])
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300, check=True
        )
        said.append(tuple(done.stdout.split()))
    (compiled, first), (interpreted, second) = said
    assert compiled.endswith(".py") is not can_build and interpreted.endswith(".py")
    assert first == second


def test_the_oracle_is_the_one_of_the_shadow_worker() -> None:
    assert wanted(prompt(5), 3) == shadow_tokens(prompt(5), 3)
