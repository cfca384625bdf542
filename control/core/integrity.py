"""The invariants of the core, checked from scratch. Called by tests after every step, by the server when
``EVENFLOW_CHECK=1`` is set, and whenever the server goes idle. Costs what runs; changes nothing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from .blocks import BlockPool, Node
from .engine import Engine
from .lane import Lane
from .migration import Migration
from .replica import Replica
from .sequence import Holder, Phase, Sequence


class IntegrityError(Exception):
    """An invariant of the core does not hold; the text says which and where."""


def check_integrity(engine: Engine) -> None:
    """Raise ``IntegrityError`` at the first invariant that does not hold."""
    for replica in engine.replicas.values():
        check_replica(replica)
    _check_accounts(engine)
    located = Counter(s for r in engine.replicas.values() for s in [*r.running, *r.settling, *r.waiting])
    located.update(engine.homeless)
    if engine.migration is not None:
        located.update(engine.migration.sequences())
        for replica in engine.replicas.values():
            _check_moves(engine.migration, replica)
    for leader, followers in engine.parked.items():
        _require(leader.phase is not Phase.DONE, f"{len(followers)} wait for {leader}, which has ended")
        located.update(followers)
    for owner, requests in engine.requests.items():
        for key, seq in requests.items():
            _require(seq.owner == owner and seq.key == key, f"{seq} is filed under {owner}/{key}")
            _require(seq.phase is not Phase.DONE, f"{seq} is done and still filed")
            _require(located.pop(seq, 0) == 1, f"{seq} is not in exactly one place")
    _require(not located, f"sequences that no client asked for: {list(located)}")


def check_replica(replica: Replica) -> None:
    """Check one replica."""
    limits = replica.limits
    _check_pool(replica.pool, [*replica.running, *replica.role.held.values()], replica.role.reserved)
    for seq in replica.running:
        _require(seq.phase in (Phase.PREFILL, Phase.DECODE), f"{seq} runs in phase {seq.phase.name}")
        _require(replica.owners[seq.slot] is seq, f"slot {seq.slot} is not {seq}'s")
        _require((seq.phase is Phase.PREFILL) == (seq in replica.prefills), f"{seq} and the prefills disagree")
        _require(0 <= seq.computed <= seq.max_len, f"{seq} has {seq.computed} computed tokens")
        _require(
            replica.pool.blocks_for(seq.planned) <= len(seq.table) <= replica.pool.blocks_for(seq.max_len),
            f"{seq}: {len(seq.table)} blocks for {seq.planned} tokens",
        )
    _check_order(replica)
    _require(len(replica.running) <= replica.max_running, "more sequences than the limit")
    for seq in [*replica.waiting, *replica.settling]:
        _require(not seq.table and not seq.node and not seq.dups, f"{seq} holds blocks")
    queued = sum(seq.known for seq in replica.waiting)
    _require(replica.waiting.tokens == queued, f"{replica.waiting.tokens} tokens counted as waiting, not {queued}")
    owed = sum(seq.owed for seq in [*replica.waiting, *replica.prefills])
    _require(replica.owed == owed, f"{replica.owed} tokens counted as owed, not {owed}")
    for seq in [*replica.running, *replica.settling]:
        left = seq.known - seq.computed if seq.phase is Phase.PREFILL else 0
        _require(seq.owed == left, f"{seq} owes {seq.owed} tokens, {left} are to be computed")
    for seq in replica.waiting:
        _require(0 < seq.owed <= seq.known, f"{seq} waits, and owes {seq.owed} tokens")
        _require(seq.phase is Phase.WAITING and not seq.pending, f"{seq} waits")
    decoding = {s for s in replica.running if s.phase is Phase.DECODE}
    for lane in replica.lanes:
        decoding -= _check_lane(lane, replica)
        _require(lane.count <= limits.token_budget, f"lane {lane.index} has {lane.count} decodes")
    _require(not decoding, f"decoding in no lane: {decoding}")
    _check_slots(replica)
    _require(len(replica.inflight) <= replica.stages + 1, "too many plans in flight")
    if not replica.running and not replica.settling and not replica.role.held and not replica.role.reserved:
        _require(replica.pool.available == replica.pool.num_blocks, "idle, but blocks are held")


def _check_order(replica: Replica) -> None:
    def place(seq: Sequence) -> tuple[float, int]:
        return seq.place if seq.account is None else (seq.account.counter, seq.order)

    prefills = [seq.place for seq in replica.prefills]
    _require(prefills == sorted(set(prefills)), "prefills are not in admission order")
    queue = replica.waiting
    waiting = list(queue)
    _require(len(waiting) == len(queue), f"the queue counts {len(queue)}, {len(waiting)} wait")
    if waiting and waiting[0].account is None:
        places = [seq.place for seq in waiting]
        _require(places == sorted(set(places)), "the queue is not in admission order")
    if waiting:
        _require(queue.head() is min(waiting, key=place), "the head is not the first of those that wait")
        _require(queue.tail() is waiting[-1], "the tail is not the last of those that wait")
    if replica.running:
        last = max(replica.running, key=place)
        _require(queue.last() is last, f"{last} is not the next to be preempted")


def _check_accounts(engine: Engine) -> None:
    """Each account counts what is on it."""
    ledger = engine.ledger
    if ledger is None:
        return
    everyone = [seq for requests in engine.requests.values() for seq in requests.values()]
    sequences = Counter(seq.account for seq in everyone)
    waiting = Counter(seq.account for replica in engine.replicas.values() for seq in replica.waiting)
    decoding = Counter(seq.account for seq in everyone if seq.lane is not None)
    for account in ledger.accounts.values():
        found = sequences.pop(account, 0), waiting[account], decoding[account]
        counted = account.sequences, account.waiting, account.decoding
        _require(found == counted, f"{account.name} has {found} sequences, waiting, decoding; it counts {counted}")
    _require(not sequences, "a sequence is on no account")
    _require(ledger.queues == [r.waiting for r in engine.replicas.values()], "the ledger knows other queues")
    tokens = sum(r.pool.num_blocks * r.pool.block_size for r in engine.replicas.values())
    _require(ledger.pool_tokens == tokens, "the ledger miscounts the pools")


def _check_lane(lane: Lane, replica: Replica) -> set[Sequence]:
    members: set[Sequence] = set()
    for slot in range(lane.width):
        if lane.bitmap[slot >> 3] >> (slot & 7) & 1:
            seq = replica.owners[slot]
            _require(seq is not None and seq.lane is lane, f"lane {lane.index} has slot {slot} of {seq}")
            assert seq is not None
            members.add(seq)
            if seq.bucket < 0:
                _require(len(seq.table) >= replica.pool.blocks_for(seq.max_len - 1), f"{seq} has no growth bucket")
            else:
                _require(lane.grow[seq.bucket].get(slot) is seq.table, f"{seq} is missing in its growth bucket")
            _require(lane.ends.get(seq.end_tick, {}).get(slot) is seq, f"{seq} has no end")
            _require(seq.end_tick >= lane.tick, f"{seq} should have ended at tick {seq.end_tick}")
    _require(len(members) == lane.count, f"lane {lane.index} counts {lane.count}, has {len(members)}")
    growing = sum(seq.bucket >= 0 for seq in members)
    _require(sum(map(len, lane.grow)) == growing, f"lane {lane.index} has stale growth entries")
    _require(sum(map(len, lane.ends.values())) == lane.count, f"lane {lane.index} has stale end entries")
    _require(sum(map(len, lane.collect.values())) <= lane.count, f"lane {lane.index} has stale columns")
    _require(Counter(s.owner for s in members) == Counter(lane.owners), f"lane {lane.index} miscounts owners")
    kv_tokens = sum(s.join_known + lane.tick - s.join_tick for s in members)
    _require(kv_tokens == lane.kv_tokens, f"lane {lane.index} sums {lane.kv_tokens} KV tokens, has {kv_tokens}")
    in_flight = sum(record.lane is lane for record in replica.inflight)
    ticks = sum(record.lane is lane and record.ticks for record in replica.inflight)
    _require(lane.in_flight == in_flight, f"lane {lane.index} counts {lane.in_flight} plans out, not {in_flight}")
    _require(lane.tick - lane.done == ticks, f"lane {lane.index} awaits {lane.tick - lane.done} ticks, not {ticks}")
    _require(in_flight <= 2, f"lane {lane.index} has {in_flight} plans out")
    return members


def _check_slots(replica: Replica) -> None:
    fenced = [slot for record in replica.inflight for slot in record.fenced]
    free = replica.free_slots
    used = {s.slot for s in replica.running}
    _require(len(fenced) == len(set(fenced)) and not used & set(fenced), "a slot is fenced twice or while in use")
    _require(not used & set(free) and not set(fenced) & set(free), "a free slot is in use or fenced")
    _require(len(used) + len(fenced) + len(free) == len(replica.owners), "slots were lost")
    collectors = Counter(s for r in replica.inflight for s in [*r.finals, *r.late])
    for seq, count in collectors.items():
        _require(seq.pending == count, f"{seq} expects {seq.pending} results, {count} are to come")


def _check_moves(migration: Migration, replica: Replica) -> None:
    """What a replica holds and has reserved is what is on its way from it and to it."""
    coming = [move for move in migration.moving.values() if move.target is replica]
    reserved = [block for move in coming for block in move.blocks]
    role = replica.role
    _require(len(coming) == role.coming, f"replica {replica.index} counts {role.coming} to come")
    _require(len(reserved) == role.reserved, f"replica {replica.index} counts {role.reserved} reserved blocks")
    _require(not set(reserved) & set(replica.pool.free), "a reserved block is free")
    _require(not role.handed, f"replica {replica.index} has handed on what nobody took")
    going = [seq for seq, source in migration.leaving if source is replica]
    going += [move.seq for move in migration.moving.values() if move.source is replica and move.seq is not None]
    going += [seq for seq in replica.settling if seq in role.held]
    _require(set(going) == set(role.held), f"replica {replica.index} holds blocks that do not move")


def _check_pool(pool: BlockPool, running: Iterable[Holder], reserved: int = 0) -> None:
    owned: Counter[int] = Counter(pool.free)
    passing: Counter[Node] = Counter()
    for seq in running:
        path: list[int] = []
        node = seq.node
        while node is not None and node.parent is not None:
            passing[node] += 1
            path = node.blocks + path
            node = node.parent
        owned.update(seq.table[seq.named :])
        owned.update(seq.dups)
        _require(len(path) == seq.named, f"{seq}: {seq.named} blocks named, {len(path)} in the tree")
        shared = set(path) | set(seq.dups)
        _require(set(seq.table[: seq.named]) <= shared, f"{seq} uses blocks that it holds no reference on")
        _require(len(set(seq.table)) == len(seq.table), f"{seq} has a block twice")
    idle = pool.idle_nodes()
    place = {node: i for i, node in enumerate(idle)}
    for node in pool.nodes():
        owned.update(node.blocks)
        size = 4 * pool.block_size
        _require(len(node.key) == size * len(node.blocks) > 0, "a run's tokens and blocks differ in length")
        parent = node.parent
        assert parent is not None
        _require(parent.children.get(node.key[:size]) is node, "a run is not its parent's child")
        _require(node.refs == passing[node], f"a run has {node.refs} references, {passing[node]} tables pass it")
        _require((node.refs == 0) == (node in place), "the LRU does not hold exactly the idle runs")
        if node.refs == 0 and parent in place:
            _require(place[node] < place[parent], "a run would be evicted before its continuation")
    _require(set(passing) <= set(pool.nodes()), "a table refers to a run that left the tree")
    _require(pool.evictable == sum(len(node.blocks) for node in idle), "the count of cached blocks is wrong")
    _require(
        len(owned) == pool.num_blocks - reserved and all(count == 1 for count in owned.values()),
        "a block is not exactly one of free, cached, referenced",
    )


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise IntegrityError(what)
