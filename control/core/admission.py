"""Who is admitted to a replica: the head of its waiting queue, or for a bounded number of times one behind it.

Admission allocates the blocks of all known tokens, or of the maximum length under a policy that reserves them, less
cached ones. A request is taken when they fit above the watermark, which does not apply when nothing holds blocks.
"""

from __future__ import annotations

from bisect import insort
from heapq import heappop
from operator import attrgetter
from typing import TYPE_CHECKING

from ..wire import Register
from .blocks import NO_MATCH, BlockPool, Match
from .packing import pack_u32
from .routing import owe
from .sequence import Phase, Sequence
from .sharing import awaits_prefix

if TYPE_CHECKING:
    from .replica import Replica

_place = attrgetter("place")


def admit(replica: Replica, room: int) -> Sequence | None:
    """Admit the next request: the head, or, if its blocks do not fit, a later one that needs at most ``room``
    tokens, which passes it at most ``overtakes`` times."""
    waiting = replica.waiting
    if not len(waiting) or len(replica.running) >= replica.max_running:
        return None
    if not replica.free_slots or replica.alone is not None:
        return None
    head = waiting.head()
    if head.deaths > 1:
        if replica.running or replica.settling or replica.inflight:
            return None
        replica.alone = head
    aligns = replica.limits.await_prefix
    if not (aligns and awaits_prefix(replica, head)) and _start(replica, head):
        return head
    replica.alone = None
    overtakes = replica.limits.overtakes
    if head.passed >= overtakes:
        return None
    for seq in waiting.behind(overtakes):
        if seq.known > room or seq.deaths > 1 or (aligns and awaits_prefix(replica, seq)):
            continue
        if _start(replica, seq):
            head.passed += 1
            return seq
    return None


def make_way(replica: Replica) -> None:
    """Preempt for the head what the order puts behind it, if the head waits for a place or for blocks and that gives
    it both. Called before a plan is made. Policies that keep a batch, or a request's blocks, to the end never do."""
    waiting = replica.waiting
    if not len(waiting) or not replica.free_slots or replica.alone is not None:
        return
    if replica.policy.reserves or replica.policy.stays:
        return
    head = waiting.head()
    if head.deaths > 1 or not waiting.outranks(head):
        return
    short = -_spare(replica, head)
    if replica.pool.held:
        short += replica.watermark
    if short <= 0 and len(replica.running) < replica.max_running:
        return
    chosen: list[Sequence] = []
    for seq in waiting.victims(head, replica.running):
        chosen.append(seq)
        short -= replica.pool.releasable(seq)
        if short <= 0:
            break
    if short <= 0:
        for seq in chosen:
            replica.preempt(seq)


def _match(pool: BlockPool, seq: Sequence) -> Match:
    # Log-probabilities of a prompt need every position computed.
    return pool.match(seq.tokens, seq.salt) if seq.sampling.prompt_logprobs < 0 else NO_MATCH


def _blocks(replica: Replica, seq: Sequence) -> int:
    """Blocks that ``seq`` starts with, cached ones included."""
    # The last token's KV is never written.
    tokens = seq.max_len - 1 if replica.policy.reserves else len(seq.tokens) >> 2
    return -(-tokens // replica.pool.block_size)


def _spare(replica: Replica, seq: Sequence) -> int:
    """Blocks that would be left if ``seq`` started; negative if too few are there."""
    pool = replica.pool
    match = _match(pool, seq)
    return len(pool.free) + pool.evictable - match.idle + match.blocks - _blocks(replica, seq)


def _start(replica: Replica, seq: Sequence) -> bool:
    """Give ``seq`` a slot and its blocks, and have workers told, if the blocks are there."""
    pool = replica.pool
    known = len(seq.tokens) >> 2
    match = _match(pool, seq)
    need = _blocks(replica, seq) - match.blocks
    spare = len(pool.free) + pool.evictable - match.idle - need
    if spare < 0 or (spare < replica.watermark and pool.held):
        return False
    waiting = replica.waiting
    waiting.remove(seq)
    if match.blocks:
        pool.claim(seq, match)
    seq.table += pool.alloc(need)
    cached = match.blocks * pool.block_size
    if not seq.generation:
        seq.cached = cached
    replica.cache_queries += known
    replica.cache_hits += cached
    begin(replica, seq, cached)
    return True


def begin(replica: Replica, seq: Sequence, computed: int) -> None:
    """Let ``seq``, which has its blocks and ``computed`` tokens in them, run in a free slot; workers are told."""
    seq.computed = computed
    owe(replica, seq, (len(seq.tokens) >> 2) - computed)
    seq.phase = Phase.PREFILL
    replica.waiting.started(seq)
    slot = heappop(replica.free_slots)
    replica.generations[slot] += 1
    seq.slot, seq.generation = slot, replica.generations[slot]
    replica.owners[slot] = seq
    replica.running[seq] = None
    prefills = replica.prefills
    if not prefills or prefills[-1].place < seq.place:
        prefills.append(seq)
    else:
        insort(prefills, seq, key=_place)
    replica.registers.append(
        Register(
            slot,
            seq.generation,
            seq.order,
            seq.tokens,
            seq.prompt_len,
            computed,
            pack_u32(seq.table),
            seq.max_len,
            seq.min_len,
            seq.stop_ids,
            seq.sampling,
        )
    )
