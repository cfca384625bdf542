"""The control process's counters and gauges, flat, as clients and the metrics page see them."""

from __future__ import annotations

from .core.engine import Engine
from .supervision import Supervisor


def snapshot(engine: Engine | None, supervisor: Supervisor, clients: int, bad_frames: int) -> dict[str, float]:
    """Name to number. Names ending in ``_total`` only grow during the life of the process."""
    values: dict[str, float] = {
        "clients": clients,
        "bad_frames_total": bad_frames,
        "worker_restarts_total": supervisor.restarts,
        "audit_failures_total": supervisor.audit_failures,
        "replicas_up": sum(site.state == "up" for site in supervisor.sites),
        "replicas": len(supervisor.sites),
    }
    if supervisor.limits is not None:
        values["token_budget"] = supervisor.limits.token_budget
        values["max_queued"] = supervisor.limits.max_queued
    if engine is None:
        return values
    replicas = engine.replicas.values()
    pools = [replica.pool for replica in replicas]
    blocks = sum(pool.num_blocks for pool in pools)
    used = sum(pool.held for pool in pools)
    values |= {
        "num_requests_running": sum(len(replica.running) for replica in replicas),
        "num_requests_waiting": len(engine.homeless)
        + sum(map(len, engine.parked.values()))
        + sum(len(replica.waiting) for replica in replicas),
        "num_decoding": sum(lane.count for replica in replicas for lane in replica.lanes),
        "kv_blocks": blocks,
        "kv_blocks_used": used,
        "kv_blocks_cached": sum(pool.evictable for pool in pools),
        "kv_blocks_free": sum(len(pool.free) for pool in pools),
        "kv_cache_usage_perc": used / blocks if blocks else 0.0,
        "requests_total": engine.counters["requests"],
        "requests_finished_total": engine.counters["finished"],
        "num_preemptions_total": engine.counters["preemptions"] + sum(r.preemptions for r in replicas),
        "prefix_cache_queries_total": engine.counters["cache_queries"] + sum(r.cache_queries for r in replicas),
        "prefix_cache_hits_total": engine.counters["cache_hits"] + sum(r.cache_hits for r in replicas),
        "iterations_total": engine.counters["iterations"] + sum(r.step for r in replicas),
    }
    for site in supervisor.sites:
        for stage, account in site.accounts.items():
            name = f"replica{site.index}_stage{stage}"
            values[f"{name}_iterations_total"] = account.iterations
            values[f"{name}_plans_late_total"] = account.late
            values[f"{name}_busy_seconds_total"] = account.busy_us / 1e6
            values[f"{name}_idle_seconds_total"] = account.idle_us / 1e6
            values[f"{name}_plan_late_seconds_total"] = account.late_us / 1e6
    return values
