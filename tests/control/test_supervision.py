"""Workers, replicas and epochs: messages and times go in, actions come out."""

from collections.abc import Sequence
from typing import Any

import pytest
from evenflow.control.core.events import Limits, ReplicaLost, ReplicaUp, Returned, SendPlan
from evenflow.control.patience import FIRST_RESULT_S, HANG_FACTOR
from evenflow.control.places import CLAIM_S
from evenflow.control.supervision import (
    FORGIVEN_S,
    MAX_BLOCKS,
    START_TIMEOUT_S,
    Action,
    Occur,
    Post,
    Supervisor,
    wait_before_epoch,
)
from evenflow.control.vacancies import VACANT_S
from evenflow.control.wire import (
    PROTOCOL_VERSION,
    BatchPlan,
    Fatal,
    Heartbeat,
    Hello,
    KillWorker,
    LauncherHello,
    Probe,
    Quit,
    Redial,
    Result,
    Resync,
    Start,
    Started,
    Terms,
    WorkerExited,
)
from structlog.testing import capture_logs

INSTANCE = 77


def hello(stage: int = 0, *, stages: int = 2, replica: int = 0, pid: int | None = None, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "version": PROTOCOL_VERSION,
        "replica": replica,
        "stage": stage,
        "rank": 0,
        "stages": stages,
        "pid": 100 + stage if pid is None else pid,
        "model": "m",
        "eos_ids": (0,),
        "block_size": 16,
        "num_blocks": 100,
        "max_tokens": 8192,
        "num_slots": 4096,
        "max_model_len": 1024,
        "vocab_size": 1000,
    }
    return Hello(**{**fields, **changes})


def supervisor(*, stages: int = 2, replicas: int = 1, limits: Limits | None = None, **options: Any) -> Supervisor:
    return Supervisor(
        limits or Limits(),
        replicas=replicas,
        stages=stages,
        links="/links",
        instance=INSTANCE,
        epoch=1000,
        **options,
    )


def identity(stage: int, replica: int = 0) -> bytes:
    return f"w{replica}.{stage}".encode()


def posted(actions: Sequence[Action], kind: type) -> list[tuple[bytes, Any]]:
    return [(a.identity, a.message) for a in actions if isinstance(a, Post) and isinstance(a.message, kind)]


def events(actions: Sequence[Action]) -> list[Any]:
    return [a.event for a in actions if isinstance(a, Occur)]


def bring_up(sup: Supervisor, now: float = 0.0, replica: int = 0, **changes: Any) -> int:
    """All stages say hello and start; the epoch."""
    actions: list[Action] = []
    for stage in range(sup.stages):
        worker = hello(stage, stages=sup.stages, replica=replica, **changes)
        actions += sup.take(identity(stage, replica), worker, now)
    epoch = posted(actions, Start)[0][1].epoch
    for stage in range(sup.stages):
        actions = sup.take(identity(stage, replica), Started(epoch), now)
    assert [type(event) for event in events(actions)] == [ReplicaUp]
    return epoch


def send(sup: Supervisor, epoch: int, step: int, now: float, digest: int | None = None, tokens: int = 1) -> None:
    sup.sent(SendPlan(0, [], BatchPlan(epoch, step, 0, b"\1"), digest, tokens, 1, 1), now)


def result(epoch: int, step: int, digest: int | None = None) -> Result:
    return Result(epoch, step, 0, 0, 0, 0, 0, digest=digest)


# ---- assembling ----------------------------------------------------------------------------------------------


def test_an_epoch_starts_when_every_stage_is_there() -> None:
    sup = supervisor()
    assert sup.take(b"b", hello(1, num_blocks=90), 0.0) == [] and not sup.ready
    actions = sup.take(b"a", hello(0), 0.0)
    starts = posted(actions, Start)
    assert {who for who, _ in starts} == {b"a", b"b"} and len({start for _, start in starts}) == 1
    start = starts[0][1]
    assert (start.epoch, start.stages, start.num_blocks, start.block_size) == (1001, 2, 90, 16)
    assert start.links == "/links" and start.token_budget == 256
    assert sup.take(b"a", Started(1001), 0.0) == [] and not sup.ready
    (up,) = events(sup.take(b"b", Started(1001), 0.0))
    assert up == ReplicaUp(0, 1001, 2, 90, start.num_slots) and sup.ready
    assert list(sup.identities(0)) == [b"b", b"a"]


def test_there_are_more_slots_than_sequences_so_that_fenced_ones_do_not_count() -> None:
    sup = supervisor(stages=1)
    (_, start), *_ = posted(sup.take(b"a", hello(0, stages=1), 0.0), Start)
    assert sup.limits is not None and start.num_slots > sup.limits.max_num_seqs


def test_started_of_an_older_epoch_does_not_count() -> None:
    sup = supervisor(stages=1)
    sup.take(b"a", hello(0, stages=1), 0.0)
    assert sup.take(b"a", Started(1000), 0.0) == [] and not sup.ready


def test_a_worker_that_says_hello_again_begins_a_new_epoch() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    actions = sup.take(identity(1), hello(1), 1.0)
    assert events(actions) == [ReplicaLost(0)]
    starts = posted(actions, Start)
    assert {who for who, _ in starts} == {identity(0), identity(1)} and starts[0][1].epoch == epoch + 1


def test_sec_1_the_place_of_a_worker_that_lives_is_not_given_away() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    actions = sup.take(b"new", hello(1, pid=555), 1.0)
    assert actions == [Post(identity(1), Heartbeat(epoch, INSTANCE))], "it is asked whether it is there"
    ((who, quit_),) = posted(sup.tick(1.0 + CLAIM_S), Quit)
    assert who == b"new" and quit_.refused and "taken by process 101" in quit_.reason
    assert sup.ready and sup.refused == 1


def test_a_worker_whose_place_is_still_a_dead_ones_has_it_at_the_next_tick() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    sup.take(b"new", hello(1, pid=555), 1.0)
    assert events(sup.gone(identity(1), 1.01)) == [ReplicaLost(0)]
    starts = posted(sup.tick(1.25), Start)
    assert {who for who, _ in starts} == {identity(0), b"new"} and starts[0][1].epoch == epoch + 1
    assert posted(sup.take(identity(1), Heartbeat(), 1.3), Redial), "the one it replaced is not known any more"


def test_replicas_live_apart() -> None:
    sup = supervisor(replicas=2, stages=1)
    bring_up(sup, replica=0)
    bring_up(sup, replica=1)
    assert events(sup.gone(identity(0, 1), 1.0)) == [ReplicaLost(1)]
    assert sup.ready and [site.state for site in sup.sites] == ["up", "down"]


def test_a_worker_that_does_not_start_is_killed() -> None:
    sup = supervisor()
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    for stage in range(2):
        sup.take(identity(stage), hello(stage), 0.0)
    sup.take(identity(0), Started(1001), 1.0)
    assert sup.tick(START_TIMEOUT_S - 1) == []
    actions = sup.tick(START_TIMEOUT_S + 1)
    assert posted(actions, KillWorker) == [(b"launcher", KillWorker(0, 1, 0, 101))]
    assert events(actions) == [] and sup.sites[0].state == "down"


# ---- misfits -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 99}, "protocol version 99"),
        ({"replica": 1}, "replica 1"),
        ({"stage": 2}, "stage 2"),
        ({"stages": 3}, "of 3"),
        ({"rank": 1}, "rank 1"),
        ({"model": "other"}, "model other"),
        ({"vocab_size": 7}, "7 ids"),
        ({"block_size": 32}, "block size 32, but 16"),
        ({"max_tokens": 100}, "100 tokens an iteration, but the token budget is 256"),
        ({"max_model_len": 512}, "sequences of 512 tokens, but 1024"),
        *(({name: 0}, f"{name} is 0") for name in ("vocab_size", "block_size", "num_blocks", "num_slots")),
    ],
)
def test_a_worker_that_does_not_fit_is_told_to_quit_and_why(changes: dict[str, Any], reason: str) -> None:
    sup = supervisor()
    bring_up(sup)
    stage = changes.pop("stage", 1)
    with capture_logs() as logs:
        actions = sup.take(b"new", hello(stage, **changes), 1.0)
    ((who, quit_),) = posted(actions, Quit)
    assert len(actions) == 1 and who == b"new" and reason in quit_.reason
    assert any(entry["event"] == "worker refused" for entry in logs)
    assert sup.ready, "the others go on"


def test_sec_1_a_pool_that_no_memory_has_is_not_believed() -> None:
    sup = supervisor(stages=1)
    ((_, start),) = posted(sup.take(b"a", hello(0, stages=1, num_blocks=(1 << 32) - 1), 0.0), Start)
    assert start.num_blocks == MAX_BLOCKS


def test_sec_1_refusals_are_counted_and_logged_once_a_second() -> None:
    sup = supervisor()
    with capture_logs() as logs:
        for n in range(1000):
            assert posted(sup.take(b"x", hello(9), n / 400), Quit)
    assert sup.refused == 1000 and len([e for e in logs if e["event"] == "worker refused"]) == 3


@pytest.mark.parametrize("changes", [{"model": "other"}, {"vocab_size": 7}, {"block_size": 32}])
def test_stages_must_agree_before_the_first_epoch_too(changes: dict[str, Any]) -> None:
    """Else the second would refuse each start, and epochs would follow each other without an end."""
    sup = supervisor()
    sup.take(b"a", hello(0), 0.0)
    assert posted(sup.take(b"b", hello(1, **changes), 0.0), Quit)
    assert posted(sup.take(b"c", hello(1), 0.0), Start)


# ---- SCH-5: knobs that disagree ------------------------------------------------------------------------------


def settled(
    wanted: Limits, stages: int = 1, model_len: int | None = None, **changes: Any
) -> tuple[Limits, list[str]]:
    sup = supervisor(limits=wanted, stages=stages, model_len=model_len)
    with capture_logs() as logs:
        bring_up(sup, **changes)
    assert sup.limits is not None
    return sup.limits, [entry["event"] for entry in logs if entry["log_level"] == "warning"]


def test_sch_5_a_sequence_limit_above_the_budget_is_lowered() -> None:
    limits, warnings = settled(Limits(token_budget=8, max_num_seqs=256), stages=2)
    assert limits.max_num_seqs == 16 and warnings == ["max-num-seqs lowered to token-budget x stages"]


def test_sch_5_a_budget_above_what_the_workers_can_is_lowered() -> None:
    limits, warnings = settled(Limits(token_budget=4096, max_num_seqs=64), max_tokens=512)
    assert limits.token_budget == 512 and warnings == ["token budget lowered to the workers' limit"]


def test_sch_5_a_model_length_above_the_pool_is_lowered() -> None:
    limits, warnings = settled(Limits(), num_blocks=20)
    assert limits.max_model_len == 320 and warnings == ["max model length lowered to what the block pool holds"]


def test_sch_5_a_shorter_model_length_may_be_asked_for() -> None:
    assert settled(Limits(), model_len=100)[0].max_model_len == 100
    assert settled(Limits(), model_len=5000)[0].max_model_len == 1024


@pytest.mark.parametrize(
    ("policy", "budget"),
    [("stall-free", 64), ("chunked-only", 64), ("prefill-first", 1024), ("request-level", 1024), ("hybrid", 1034),
     ("hybrid-only", 1034)],
)  # fmt: skip
def test_an_iteration_holds_the_longest_sequence_where_prompts_are_computed_whole(policy: str, budget: int) -> None:
    limits, warnings = settled(Limits(token_budget=64, max_num_seqs=10, policy=policy))
    assert (limits.token_budget, limits.max_model_len, warnings) == (budget, 1024, [])
    limits, warnings = settled(Limits(token_budget=4000, max_num_seqs=10, policy=policy))
    assert limits.token_budget == 4000 and warnings == []


def test_sequences_are_no_longer_than_the_workers_can_compute_whole() -> None:
    limits, warnings = settled(Limits(policy="prefill-first"), max_tokens=512)
    assert limits.token_budget == limits.max_model_len == 512
    (warning,) = warnings
    assert (
        warning == "max model length lowered to the workers' tokens an iteration: the policy computes prompts whole"
    )
    limits, warnings = settled(Limits(policy="stall-free"), max_tokens=512)
    assert limits.max_model_len == 1024 and warnings == []


def test_sch_5_nothing_is_said_where_all_fits() -> None:
    limits, warnings = settled(Limits(), tile=64)
    assert warnings == [] and limits.tile == 64 and limits.block_size == 16


def test_kv_5_the_shortest_prefix_that_can_hit_is_logged() -> None:
    sup = supervisor(stages=1)
    with capture_logs() as logs:
        bring_up(sup)
    assert [entry["shortest_prefix_tokens"] for entry in logs if "prefix cache" in entry["event"]] == [16]


def test_limits_stay_what_they_are_when_a_replica_comes_back() -> None:
    sup = supervisor(stages=1)
    bring_up(sup)
    before = sup.limits
    sup.gone(identity(0), 1.0)
    bring_up(sup, now=2.0, num_blocks=10)
    assert sup.limits is before and sup.sites[0].num_blocks == 10


# ---- the control process was restarted -----------------------------------------------------------------------


def test_workers_of_an_earlier_life_are_asked_to_dial_again() -> None:
    sup = supervisor()
    for message in (Heartbeat(5), result(5, 3), Started(5), Resync(5, 3, "gap")):
        assert sup.take(b"old", message, 0.0) == [Post(b"old", Redial(INSTANCE))]
    assert sup.take(b"old", hello(0), 0.0) == []
    assert sup.take(b"old", Heartbeat(5), 0.0) == [], "now it is known"


def test_heartbeats_go_to_every_worker_with_the_life_of_control() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    assert posted(sup.beat(), Heartbeat) == [(identity(s), Heartbeat(epoch, INSTANCE)) for s in range(2)]


def test_the_launcher_is_not_taken_for_a_worker() -> None:
    sup = supervisor()
    assert sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0) == []
    assert sup.take(b"launcher", Heartbeat(), 0.0) == []


def test_sec_1_there_is_one_launcher_until_it_is_gone() -> None:
    sup = supervisor()
    bring_up(sup)
    hello_ = LauncherHello(PROTOCOL_VERSION, 1)
    sup.take(b"launcher", hello_, 0.0)
    assert sup.take(b"stranger", hello_, 1.0) == [Post(b"launcher", Heartbeat(0, INSTANCE))] and sup.refused == 1
    assert posted(sup.take(b"stranger", WorkerExited(0, 1, 0, 101, -9), 1.0), Redial) and sup.ready
    assert sup.gone(b"launcher", 1.1) == []
    assert sup.take(b"stranger", hello_, 2.0) == [] and sup.take(b"stranger", Heartbeat(), 2.0) == []


# ---- results -------------------------------------------------------------------------------------------------


def test_only_the_last_stage_reports_to_the_core() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    send(sup, epoch, 0, 1.0)
    assert sup.take(identity(0), result(epoch, 0), 1.1) == []
    assert events(sup.take(identity(1), result(epoch, 0), 1.2)) == [Returned(0, result(epoch, 0))]
    assert not sup.sites[0].inflight


def test_results_of_older_epochs_are_dropped() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    sup.take(identity(1), hello(1), 1.0)
    for stage in range(2):
        sup.take(identity(stage), Started(epoch + 1), 1.0)
    send(sup, epoch + 1, 0, 1.0)
    assert sup.take(identity(1), result(epoch, 0), 1.1) == []
    assert len(sup.sites[0].inflight) == 1


def test_a_worker_whose_tables_differ_is_fenced() -> None:
    sup = supervisor()
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    epoch = bring_up(sup)
    send(sup, epoch, 15, 1.0, digest=123)
    assert sup.take(identity(0), result(epoch, 15, digest=123), 1.1) == []
    with capture_logs() as logs:
        actions = sup.take(identity(1), result(epoch, 15, digest=124), 1.2)
    assert events(actions) == [ReplicaLost(0)], "its ids are not believed either"
    assert posted(actions, KillWorker) == [(b"launcher", KillWorker(0, 1, 0, 101))] and not posted(actions, Start)
    assert list(sup.identities(0)) == [identity(0)], "no plan is sent to it any more"
    assert posted(sup.take(identity(1), result(epoch, 16), 1.3), Redial), "nor is a result of it taken"
    assert sup.audit_failures == 1 and any(entry["log_level"] == "error" for entry in logs)
    assert posted(sup.take(b"fresh", hello(1, pid=300), 2.0), Start)[0][1].epoch == epoch + 1


def test_an_earlier_stage_is_audited_as_well() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    send(sup, epoch, 15, 1.0, digest=123)
    assert events(sup.take(identity(0), result(epoch, 15, digest=0), 1.1)) == [ReplicaLost(0)]


def test_a_worker_out_of_step_begins_a_new_epoch() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    actions = sup.take(identity(0), Resync(epoch, 4, "gap"), 1.0)
    assert events(actions) == [ReplicaLost(0)]
    assert {who for who, _ in posted(actions, Start)} == {identity(0), identity(1)}
    assert sup.take(identity(0), Resync(epoch, 4, "gap"), 1.0) == [], "it was about the epoch before"


def test_epochs_that_living_workers_end_again_and_again_follow_each_other_ever_more_slowly() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    now, waits = 1.0, list[float]()
    for _ in range(8):
        began = posted(sup.take(identity(0), Resync(epoch, 4, "gap"), now), Start)
        ended = now
        while not began:
            now += 0.25
            began = posted(sup.tick(now), Start)
        waits.append(now - ended)
        epoch = began[0][1].epoch
        for stage in range(2):
            sup.take(identity(stage), Started(epoch), now)
        assert sup.ready
    assert waits == [wait_before_epoch(n) for n in range(1, 9)] == [0, 0.5, 1, 2, 4, 8, 10, 10]
    now += FORGIVEN_S + 1
    assert posted(sup.take(identity(0), Resync(epoch, 4, "gap"), now), Start), "one that lasted makes up for them"


def test_a_contradiction_that_the_core_finds_begins_a_new_epoch() -> None:
    sup = supervisor()
    epoch = bring_up(sup)
    actions = sup.out_of_step(0, "result of step 5, expected 4", 1.0)
    assert events(actions) == [ReplicaLost(0)] and posted(actions, Start)[0][1].epoch == epoch + 1


# ---- death and hanging ---------------------------------------------------------------------------------------


def test_a_dead_worker_ends_the_epoch_and_the_others_wait() -> None:
    sup = supervisor()
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    bring_up(sup)
    actions = sup.take(b"launcher", WorkerExited(0, 1, 0, 101, -9), 1.0)
    assert events(actions) == [ReplicaLost(0)] and not posted(actions, Start) and sup.restarts == 1
    assert not sup.ready and list(sup.identities(0)) == [identity(0)]
    assert posted(sup.take(b"new", hello(1, pid=200), 2.0), Start)


def test_the_death_of_another_process_is_not_this_workers() -> None:
    """The report of an earlier process of that place can come after the new one dialled in."""
    sup = supervisor()
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    bring_up(sup)
    assert sup.take(b"launcher", WorkerExited(0, 1, 0, 999, -9), 1.0) == []
    assert sup.take(b"launcher", WorkerExited(7, 0, 0, 100, -9), 1.0) == []
    assert sup.ready


def test_sec_1_only_the_launcher_reports_deaths() -> None:
    sup = supervisor()
    bring_up(sup)
    died = WorkerExited(0, 1, 0, 101, -9)
    assert sup.take(b"stranger", died, 1.0) == [Post(b"stranger", Redial(INSTANCE))] and sup.restarts == 0
    assert sup.take(identity(0), died, 1.0) == [] and sup.ready
    actions = sup.take(b"stranger", LauncherHello(PROTOCOL_VERSION + 1, 1), 1.0)
    assert posted(actions, Fatal)[0][1].message.startswith(f"protocol version {PROTOCOL_VERSION + 1}")
    assert posted(sup.take(b"stranger", died, 1.0), Redial) and sup.ready and sup.refused == 1


@pytest.mark.parametrize(("returned", "stuck"), [((), 0), ((0,), 1), ((0, 1), 2)])
def test_the_first_stage_that_has_not_returned_hangs(returned: tuple[int, ...], stuck: int) -> None:
    sup = supervisor(stages=3, hang_timeout=2.0)
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    epoch = bring_up(sup)
    send(sup, epoch, 0, 10.0)
    for stage in range(3):
        sup.take(identity(stage), result(epoch, 0), 10.01)
    send(sup, epoch, 1, 20.0)
    send(sup, epoch, 2, 20.0)
    for stage in returned:
        sup.take(identity(stage), result(epoch, 1), 20.1)
    assert sup.tick(21.9) == []
    actions = sup.tick(22.1)
    assert events(actions) == [ReplicaLost(0)]
    assert posted(actions, KillWorker) == [(b"launcher", KillWorker(0, stuck, 0, 100 + stuck))]
    assert sup.tick(30.0) == [] and identity(stuck) not in sup.identities(0)


def test_without_work_nothing_hangs() -> None:
    sup = supervisor(hang_timeout=2.0)
    bring_up(sup)
    assert sup.tick(1000.0) == []


def test_the_first_iteration_of_an_epoch_may_take_longer() -> None:
    sup = supervisor(stages=1, hang_timeout=2.0)
    epoch = bring_up(sup)
    send(sup, epoch, 0, 10.0)
    assert sup.tick(10.0 + FIRST_RESULT_S - 0.1) == []
    assert events(sup.tick(10.0 + FIRST_RESULT_S + 0.1)) == [ReplicaLost(0)]


def test_slow_iterations_raise_the_limit() -> None:
    sup = supervisor(stages=1, hang_timeout=2.0)
    epoch = bring_up(sup)
    send(sup, epoch, 0, 10.0)
    sup.take(identity(0), result(epoch, 0), 11.5)
    send(sup, epoch, 1, 20.0)
    assert sup.tick(20.0 + HANG_FACTOR * 1.5 - 0.1) == []
    assert events(sup.tick(20.0 + HANG_FACTOR * 1.5 + 0.1)) == [ReplicaLost(0)]


def test_an_iteration_with_many_more_tokens_than_any_lately_may_take_as_much_longer() -> None:
    sup = supervisor(stages=1, hang_timeout=2.0)
    epoch = bring_up(sup)
    send(sup, epoch, 0, 10.0, tokens=20)
    sup.take(identity(0), result(epoch, 0), 10.5)
    send(sup, epoch, 1, 20.0, tokens=8000)
    assert sup.tick(20.0 + 0.5 * 400 - 0.1) == []
    assert events(sup.tick(20.0 + 0.5 * 400 + 0.1)) == [ReplicaLost(0)]
    epoch = bring_up(sup, 300.0)
    send(sup, epoch, 0, 310.0, tokens=1024)
    assert sup.tick(310.0 + 2 * FIRST_RESULT_S - 0.1) == []
    assert events(sup.tick(310.0 + 2 * FIRST_RESULT_S + 0.1)) == [ReplicaLost(0)]


def test_a_lost_connection_is_a_death() -> None:
    sup = supervisor()
    bring_up(sup)
    assert events(sup.gone(identity(0), 1.0)) == [ReplicaLost(0)]
    assert sup.gone(identity(0), 1.0) == [] and sup.gone(b"nobody", 1.0) == []
    assert posted(sup.take(identity(0), Heartbeat(), 2.0), Redial)


def test_epochs_only_grow() -> None:
    sup = supervisor(replicas=2, stages=1)
    seen: list[int] = []
    for life in range(3):
        for replica in range(2):
            seen.append(bring_up(sup, now=float(life), replica=replica))
        for replica in range(2):
            sup.gone(identity(0, replica), float(life))
    assert seen == list(range(1001, 1007))


# ---- workers started by hand ---------------------------------------------------------------------------------


def by_hand(stage: int = 0, **changes: Any) -> Hello:
    return hello(stage, **{"stages": 1, "external": True, "host": "a/1", **changes})


def external(stages: int = 1, replicas: int = 1, **options: Any) -> Supervisor:
    """All replicas but the first (or the only one) have workers that are started by hand."""
    places = range(1, replicas) if replicas > 1 else [0]
    return supervisor(stages=stages, replicas=replicas, external=places, **options)


def refusals(actions: Sequence[Action]) -> list[tuple[bytes, str]]:
    return [(who, quit_.reason) for who, quit_ in posted(actions, Quit) if quit_.refused]


def test_a_probe_is_told_what_workers_must_know() -> None:
    sup = external(stages=2, replicas=2, limits=Limits(token_budget=64, max_num_seqs=9, block_size=32))
    ((who, terms),) = posted(sup.take(b"p", Probe(PROTOCOL_VERSION, 1, 0), 0.0), Terms)
    assert who == b"p" and terms == Terms(2, 2, 32, 64, 9)
    assert posted(sup.take(b"p", Probe(PROTOCOL_VERSION, 1, 1, stages=2), 0.0), Terms)
    sup = external(stages=1, replicas=2, limits=Limits(token_budget=64, max_num_seqs=9, policy="hybrid"))
    ((_, terms),) = posted(sup.take(b"p", Probe(PROTOCOL_VERSION, 1, 0), 0.0), Terms)
    assert terms.token_budget == 8192 + 9, "as the launcher tells its own workers"


@pytest.mark.parametrize(
    ("probe", "reason"),
    [
        (Probe(99, 1, 0), "protocol version 99"),
        (Probe(PROTOCOL_VERSION, 2, 0), "replica 2, stage 0 of 2"),
        (Probe(PROTOCOL_VERSION, 1, 2), "stage 2 of 2"),
        (Probe(PROTOCOL_VERSION, 1, 0, stages=3), "stage 0 of 3"),
        (Probe(PROTOCOL_VERSION, 0, 0), "replica 0 is started by the launcher; replicas for workers"),
    ],
)
def test_a_probe_for_a_place_that_is_not_there_is_refused(probe: Probe, reason: str) -> None:
    sup = external(stages=2, replicas=2)
    with capture_logs() as logs:
        ((who, said),) = refusals(sup.take(b"p", probe, 0.0))
    assert who == b"p" and reason in said
    assert any(entry["event"] == "worker refused" for entry in logs)


def test_workers_started_by_hand_and_by_the_launcher_keep_to_their_replicas() -> None:
    sup = external(replicas=2)
    assert "started by the launcher" in refusals(sup.take(b"x", by_hand(replica=0), 0.0))[0][1]
    local = hello(0, stages=1, replica=1)
    assert "for workers started by hand" in refusals(sup.take(b"y", local, 0.0))[0][1]
    assert posted(sup.take(b"y", hello(0, stages=1, replica=0), 0.0), Start)[0][1].links == "/links"
    assert posted(sup.take(b"x", by_hand(replica=1), 0.0), Start)[0][1].links == "/links.r1"


def test_a_place_that_is_taken_is_refused_to_the_second() -> None:
    sup = external()
    epoch = posted(sup.take(b"one", by_hand(), 0.0), Start)[0][1].epoch
    sup.take(b"one", Started(epoch), 0.0)
    actions = sup.take(b"two", by_hand(pid=5), 1.0)
    assert actions == [Post(b"one", Heartbeat(epoch, INSTANCE))], "it is asked whether it is there"
    assert sup.take(b"two", Heartbeat(), 1.5) == [] and sup.tick(1.5) == []
    assert "already" in refusals(sup.take(b"three", by_hand(pid=6), 1.6))[0][1]
    with capture_logs() as logs:
        ((who, said),) = refusals(sup.tick(1.0 + CLAIM_S))
    assert who == b"two" and said == "replica 0, stage 0 is taken by process 100 on a"
    assert any(entry["event"] == "worker refused" for entry in logs)
    assert sup.ready and list(sup.identities(0)) == [b"one"], "the first one goes on undisturbed"


def test_a_place_whose_worker_turns_out_to_be_gone_is_the_seconds() -> None:
    sup = external()
    epoch = posted(sup.take(b"one", by_hand(), 0.0), Start)[0][1].epoch
    sup.take(b"one", Started(epoch), 0.0)
    sup.take(b"two", by_hand(pid=5), 1.0)
    assert events(sup.gone(b"one", 1.1)) == [ReplicaLost(0)]
    ((who, start),) = posted(sup.tick(1.25), Start)
    assert who == b"two" and start.epoch == epoch + 1
    assert sup.tick(10.0) == [], "the claim is settled"


def test_a_worker_started_by_hand_that_dials_again_keeps_its_place() -> None:
    sup = external()
    epoch = posted(sup.take(b"one", by_hand(), 0.0), Start)[0][1].epoch
    assert posted(sup.take(b"one", by_hand(), 1.0), Start)[0][1].epoch == epoch + 1


def test_a_worker_started_by_hand_that_hangs_is_fenced_and_left_alone() -> None:
    sup = external(hang_timeout=1.0)
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    epoch = posted(sup.take(b"one", by_hand(), 0.0), Start)[0][1].epoch
    sup.take(b"one", Started(epoch), 0.0)
    send(sup, epoch, 0, 1.0)
    actions = sup.tick(1.0 + FIRST_RESULT_S + 1)
    assert events(actions) == [ReplicaLost(0)] and not posted(actions, KillWorker) and not posted(actions, Quit)
    assert posted(sup.take(b"one", result(epoch, 0), 20.0), Redial), "it may come back"


def test_a_worker_started_by_hand_that_cannot_start_is_told_to_end_with_its_own_words() -> None:
    sup = external()
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    epoch = posted(sup.take(b"one", by_hand(), 0.0), Start)[0][1].epoch
    actions = sup.take(b"one", Resync(epoch, 0, "no place to meet"), 0.1)
    assert refusals(actions) == [(b"one", "no place to meet")] and not posted(actions, KillWorker)


def test_stages_of_a_replica_on_two_hosts_are_refused() -> None:
    sup = external(stages=2)
    sup.take(b"one", by_hand(0, stages=2), 0.0)
    ((who, said),) = refusals(sup.take(b"two", by_hand(1, stages=2, host="b/2"), 0.0))
    assert who == b"two" and said.startswith("stage 1 on b shares no memory with stage 0 on a")
    assert posted(sup.take(b"three", by_hand(1, stages=2), 0.0), Start)


def test_a_counter_never_falls_whatever_a_worker_says_of_its_clock() -> None:
    sup = supervisor(stages=1)
    epoch = bring_up(sup)
    send(sup, epoch, 0, 1.0)
    sup.take(identity(0), Result(epoch, 0, 0, 0, (1 << 64) - 1, 0, 0), 1.1)
    assert sup.sites[0].bubbles.accounts[0].busy_us == 0


# ---- a worker that hangs out of sight --------------------------------------------------------------------------


def test_a_place_that_stays_vacant_is_asked_after() -> None:
    """A worker that hangs and that this control process has never heard of, or whose connection broke."""
    sup = supervisor(stages=2)
    sup.take(identity(0), hello(0), 0.0)
    assert not posted(sup.tick(200.0), KillWorker), "there is no launcher that could be asked"
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 200.0)
    assert not posted(sup.tick(200.0), KillWorker)
    assert not posted(sup.tick(200.0 + VACANT_S - 1), KillWorker)
    asked = [(b"launcher", KillWorker(0, 1, 0, 0))]
    assert posted(sup.tick(200.0 + VACANT_S), KillWorker) == asked
    assert not posted(sup.tick(201.0 + VACANT_S), KillWorker)
    assert posted(sup.tick(200.0 + 2 * VACANT_S), KillWorker) == asked
    sup.take(identity(1), hello(1), 200.0 + 2 * VACANT_S)
    late = posted(sup.tick(200.0 + 3.5 * VACANT_S), KillWorker)
    assert all(order.pid for _, order in late), "nobody is vacant any more"


def test_a_vacant_place_of_a_worker_started_by_hand_is_left_alone() -> None:
    sup = supervisor(stages=1, external=[0])
    sup.take(b"launcher", LauncherHello(PROTOCOL_VERSION, 1), 0.0)
    sup.tick(0.0)
    assert not posted(sup.tick(10 * VACANT_S), KillWorker)
