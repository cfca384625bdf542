"""Policies that cut prompts into chunks: stall-free (Sarathi-Serve, Algorithm 3) and its half without mixed batches.

Prefills in progress come first, oldest first; then new requests while the budget, the sequence limit and the
allocator allow. A share of the prefill tokens is kept for the next requests, so that a short prompt starts within a
bounded number of iterations however long the prompts before it are; what they leave goes back to the prefills in
progress.
"""

from __future__ import annotations

from math import ceil
from typing import TYPE_CHECKING

from .policy import Chunks, Policy
from .timed_chunks import timed_chunks

if TYPE_CHECKING:
    from .lane import Lane
    from .replica import Replica


class StallFree(Policy):
    """Every running decode of the lane is in the batch; chunks take what it leaves of the budget."""

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        decodes = replica.run_decodes(lane)
        if replica.budget is not None:
            return timed_chunks(replica, replica.budget, decodes, lane.kv_tokens)
        return chunks_for(replica, decodes)


class ChunkedOnly(Policy):
    """Chunks and decodes in iterations of their own, which alternate in a lane while it has both ("chunked-prefills
    only" of the paper's Table 4)."""

    def __init__(self, lanes: int) -> None:
        self._read = [False] * lanes  #: whether the lane's last iteration was one of chunks

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        if not (self._read[lane.index] and lane.count):
            chunks = chunks_for(replica, 0)
            if chunks:
                self._read[lane.index] = True
                return chunks
        self._read[lane.index] = False
        replica.run_decodes(lane)
        return []


def chunks_for(replica: Replica, decodes: int) -> Chunks:
    """Choose chunks for an iteration that already holds ``decodes`` tokens; admits requests as a side effect.

    Returns (sequence, tokens) with at least one token each and at most the budget in all.
    """
    limits = replica.limits
    left = limits.token_budget - decodes
    prefills = replica.prefills
    if left <= 0 or not (prefills or replica.waiting):
        return []
    if limits.tile:
        # A chunk that does not end its prompt fills the iteration, so this aligns the batch total.
        spare = limits.token_budget % limits.tile
        if spare < left:
            left -= spare
    if replica.stages > 1:
        left = replica.balance.room(replica, decodes, left)
    kept = left
    if prefills:
        owed = 0
        for seq in prefills:
            owed += (len(seq.tokens) >> 2) - seq.computed
            if owed >= left:
                break
        share = min(ceil(left * limits.share), left - 1) if replica.waiting else 0
        kept = max(left - owed, share)
    old = list(prefills)
    fresh: Chunks = []
    while kept > 0:
        new = replica.admit(kept)
        if new is None:
            break
        taken = min((len(new.tokens) >> 2) - new.computed, kept)
        fresh.append((new, taken))
        kept -= taken
        left -= taken
    chunks: Chunks = []
    for seq in old:
        if left <= 0:
            break
        taken = min((len(seq.tokens) >> 2) - seq.computed, left)
        chunks.append((seq, taken))
        left -= taken
    return chunks + fresh
