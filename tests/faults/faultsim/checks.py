"""What must hold: after every event the cheap part, now and then all of it, and at the end that nothing is left."""

from evenflow.control.core.engine import Engine
from evenflow.control.core.integrity import check_integrity
from evenflow.control.server import ControlServer

from .clients import Violation

#: Events between two full checks.
FULL_EVERY = 50


def require(holds: bool, problem: str) -> None:
    if not holds:
        raise Violation(problem)


def quick(server: ControlServer) -> None:
    """After every event that the control process saw."""
    engine = server.engine
    supervisor = server.supervisor
    require(not supervisor.audit_failures, "the audit failed")
    if engine is None:
        return
    placed = len(engine.homeless)
    for followers in engine.parked.values():
        placed += len(followers)
    for index, replica in engine.replicas.items():
        pool, inflight, running = replica.pool, replica.inflight, len(replica.running)
        where = f"replica {index}"
        require(0 <= len(pool.free) + pool.evictable <= pool.num_blocks, f"{where}: blocks are counted twice")
        require(len(inflight) <= replica.stages + 1, f"{where}: {len(inflight)} plans are out")
        require(running <= replica.max_running, f"{where}: {running} sequences run")
        decoding = out = 0
        for lane in replica.lanes:
            decoding += lane.count
            out += lane.in_flight
            require(0 <= lane.in_flight <= 2, f"{where}: {lane.in_flight} plans of lane {lane.index} are out")
            require(0 <= lane.count <= replica.limits.token_budget, f"{where}: {lane.count} decodes in a lane")
        require(out == len(inflight), f"{where}: lanes count {out} plans, {len(inflight)} are out")
        require(decoding + len(replica.prefills) == running, f"{where}: {running} run, {decoding} decode")
        fenced = 0
        for record in inflight:
            fenced += len(record.fenced)
        slots = len(replica.free_slots) + running + fenced
        require(slots == len(replica.owners), f"{where}: {slots} slots of {len(replica.owners)} are somewhere")
        site = supervisor.sites[index]
        require(site.state == "up" and site.epoch == replica.epoch, f"{where} runs in an epoch that is over")
        require(len(site.inflight) == len(inflight), f"{where}: supervised plans differ")
        placed += running + len(replica.settling) + len(replica.waiting)
    asked = 0
    for requests in engine.requests.values():
        asked += len(requests)
    require(placed == asked, f"{asked} requests, {placed} are somewhere")


def full(engine: Engine) -> None:
    """From scratch."""
    check_integrity(engine)


def at_rest(server: ControlServer, clients: int) -> str | None:
    """Why the control process has not come to rest, or None."""
    engine = server.engine
    if not all(site.state == "up" for site in server.supervisor.sites):
        return "a replica is not up"
    if engine is None or engine.requests:
        return "requests are unfinished"
    if any(replica.inflight for replica in engine.replicas.values()):
        return "plans are out"
    if server.delivery.slow or server.delivery.doomed:
        return "clients are being waited for"
    if len(server.sessions.by_owner) != clients:
        return f"{len(server.sessions.by_owner)} clients are known, {clients} live"
    return None


def nothing_left(server: ControlServer, workers: int) -> None:
    """At rest: blocks, slots and memory have returned."""
    engine = server.engine
    assert engine is not None
    check_integrity(engine)
    for replica in engine.replicas.values():
        require(replica.pool.available == replica.pool.num_blocks, "idle, and blocks are held")
        require(len(replica.free_slots) == len(replica.owners), "idle, and slots are taken")
        require(all(owner is None for owner in replica.owners), "idle, and slots have owners")
        require(not replica.waiting, "idle, and somebody waits")
    require(not engine.homeless and not engine.parked, "idle, and somebody waits for a replica")
    sessions, delivery, times = server.sessions, server.delivery, server.telemetry.times
    fanout = delivery.fanout
    owners = range(sessions._numbers)
    require(not any(map(fanout.owned_by, owners)), "a slot belongs to a request that has ended")
    require(not times._arrived and not times._paused, "times of requests that have ended are kept")
    require(len(sessions.by_identity) == len(sessions.by_owner) == len(sessions._by_secret), "sessions are left over")
    require(all(session.waiting is None for session in sessions.by_owner.values()), "messages wait for a client")
    require(not server._early, "submissions wait for a first replica")
    require(len(server.supervisor._workers) == workers, "workers are known that are gone")
    require(not server.bad_frames, f"{server.bad_frames} messages did not decode")
