"""The control process's counters and gauges, flat, as clients and the metrics page see them, and its requests."""

from __future__ import annotations

from collections.abc import Iterator

from .bubbles import CAUSES
from .core.engine import Engine
from .core.sequence import Sequence
from .promises import promise_figures
from .supervision import Supervisor
from .telemetry import Telemetry
from .wire import PROTOCOL_VERSION, RequestRow, Welcome

#: Percentiles of token times that are reported.
QUANTILES = (0.5, 0.9, 0.99)


def figure(name: str, **labels: str | int) -> str:
    """A figure's full name: ``figure("a", stage=1)`` is ``a{stage="1"}``. Values are plain words and numbers."""
    inside = ",".join(f'{label}="{value}"' for label, value in labels.items())
    return f"{name}{{{inside}}}" if inside else name


def describe_service(
    supervisor: Supervisor,
    *,
    instance: int,
    name: str | None,
    draining: bool,
    max_sequence: int,
    session: int,
    max_requests: int,
    events: str,
) -> Welcome:
    """What a client is told of the service; zeros where nothing is known before a worker has dialled in."""
    limits, model = supervisor.limits, supervisor.model
    return Welcome(
        PROTOCOL_VERSION,
        instance,
        name or ("" if model is None else model.model),
        supervisor.ready and not draining,
        0 if limits is None else limits.max_model_len,
        0 if model is None else model.vocab_size,
        0 if limits is None else limits.block_size,
        max_sequence,
        0 if limits is None else limits.max_num_seqs,
        0 if limits is None else limits.token_budget,
        () if model is None else model.eos_ids,
        session,
        max_requests,
        events,
    )


def snapshot(
    engine: Engine | None, supervisor: Supervisor, telemetry: Telemetry, clients: int, bad_frames: int, now: float
) -> dict[str, float]:
    """Name to number. Names ending in ``_total`` only grow during the life of the process."""
    values: dict[str, float] = {
        "clients": clients,
        "bad_frames_total": bad_frames,
        "worker_restarts_total": supervisor.restarts,
        "workers_refused_total": supervisor.refused,
        "audit_failures_total": supervisor.audit_failures,
        "epochs_total": supervisor.epochs_begun,
        "epochs_lost_total": supervisor.epochs_lost,
        "replicas_up": sum(site.state == "up" for site in supervisor.sites),
        "replicas": len(supervisor.sites),
    }
    if supervisor.limits is not None:
        values["token_budget"] = supervisor.limits.token_budget
        values["max_queued"] = supervisor.limits.max_queued
        values["max_num_seqs"] = supervisor.limits.max_num_seqs * len(supervisor.sites)
    for code, count in telemetry.refused.items():
        values[figure("requests_refused_total", code=code)] = count
    for reason, count in telemetry.ended.items():
        values[figure("requests_ended_total", reason=reason)] = count
    for site in supervisor.sites:
        for stage, account in enumerate(site.bubbles.accounts):
            place = {"replica": site.index, "stage": stage}
            values[figure("stage_iterations_total", **place)] = account.iterations
            values[figure("stage_plans_late_total", **place)] = account.late
            values[figure("stage_busy_seconds_total", **place)] = account.busy_us / 1e6
            values[figure("stage_idle_seconds_total", **place)] = account.idle_us / 1e6
            for cause, idle_us in zip(CAUSES, account.causes, strict=True):
                values[figure("stage_bubble_seconds_total", **place, cause=cause)] = idle_us / 1e6
    if engine is not None:
        values |= _scheduled(engine) | promise_figures(engine) | _given(telemetry, now)
    return values


def _scheduled(engine: Engine) -> dict[str, float]:
    """What the core holds and has done."""
    replicas = engine.replicas.values()
    pools = [replica.pool for replica in replicas]
    blocks = sum(pool.num_blocks for pool in pools)
    used = sum(pool.held for pool in pools)
    return {
        "num_requests_running": sum(len(replica.running) for replica in replicas),
        "num_requests_waiting": len(engine.homeless)
        + sum(map(len, engine.parked.values()))
        + sum(len(replica.waiting) for replica in replicas),
        "num_tokens_waiting": sum(seq.known for seq in engine.homeless)
        + sum(seq.known for followers in engine.parked.values() for seq in followers)
        + sum(replica.waiting.tokens for replica in replicas),
        "num_decoding": sum(lane.count for replica in replicas for lane in replica.lanes),
        "kv_blocks": blocks,
        "kv_blocks_used": used,
        "kv_blocks_cached": sum(pool.evictable for pool in pools),
        "kv_blocks_free": sum(len(pool.free) for pool in pools),
        "kv_cache_usage_perc": used / blocks if blocks else 0.0,
        "retry_after_seconds": engine.retry_ms() / 1000,
        "requests_total": engine.counters["requests"],
        "requests_finished_total": engine.counters["finished"],
        "num_preemptions_total": engine.counters["preemptions"] + sum(r.preemptions for r in replicas),
        "prefix_cache_queries_total": engine.counters["cache_queries"] + sum(r.cache_queries for r in replicas),
        "prefix_cache_hits_total": engine.counters["cache_hits"] + sum(r.cache_hits for r in replicas),
        "iterations_total": engine.counters["iterations"] + sum(r.step for r in replicas),
    }


def _given(telemetry: Telemetry, now: float) -> dict[str, float]:
    """What was in the iterations, and when tokens came out."""
    times = telemetry.times
    values: dict[str, float] = {
        "iteration_decode_tokens_total": telemetry.decode_tokens,
        "iteration_prefill_tokens_total": telemetry.chunk_tokens,
        "iteration_budget_tokens_total": telemetry.budget_tokens,
        "tokens_given_out_total": times.tokens,
    }
    for kind, count in telemetry.iterations.items():
        values[figure("iterations_by_kind_total", kind=kind)] = count
    for name, histogram in (("recent_ttft_seconds", times.ttft), ("recent_tbt_seconds", times.tbt)):
        found = histogram.percentiles(QUANTILES, now)
        for share, value in zip(QUANTILES, found or (), strict=False):
            values[figure(name, quantile=f"{share:g}")] = value
    return values


def request_rows(engine: Engine | None, telemetry: Telemetry, most: int, now: float) -> list[RequestRow]:
    """At most ``most`` unfinished requests: those that run, then those that wait, each by admission order."""
    if engine is None or not most:
        return []
    rows: list[RequestRow] = []
    for replica, seq in _unfinished(engine):
        if len(rows) == most:
            break
        received = seq.received
        age = now - telemetry.times.arrived(seq.owner, seq.key, now)
        rows.append(
            RequestRow(
                seq.request,
                replica,
                seq.phase.name.lower(),
                seq.prompt_len,
                min(seq.planned, seq.prompt_len),
                seq.cached,
                received - seq.prompt_len,
                seq.max_len - seq.prompt_len,
                int(age * 1000),
            )
        )
    return rows


def _unfinished(engine: Engine) -> Iterator[tuple[int | None, Sequence]]:
    replicas = engine.replicas.values()
    for replica in replicas:
        yield from ((replica.index, seq) for seq in replica.running)
        yield from ((replica.index, seq) for seq in replica.settling)
    for replica in replicas:
        yield from ((replica.index, seq) for seq in replica.waiting)
    yield from ((None, seq) for seq in engine.homeless)
    for followers in engine.parked.values():
        yield from ((None, seq) for seq in followers)
