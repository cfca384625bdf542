"""What goes into an iteration besides its decodes: the stall-free policy (Sarathi-Serve, Algorithm 3).

Every running decode of the lane is in the batch; prefills in progress come next, oldest first; then new requests
while the budget, the sequence limit and the allocator allow. A share of the prefill tokens is kept for the next
requests, so that a short prompt starts within a bounded number of iterations however long the prompts before it are;
what they leave goes back to the prefills in progress.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .replica import Replica

Chunks = list[tuple[Sequence, int]]


def stall_free(replica: Replica, decodes: int) -> Chunks:
    """Choose chunks for an iteration that already holds ``decodes`` tokens; admits requests as a side effect.

    Returns (sequence, tokens) with at least one token each and at most the budget in all.
    """
    limits = replica.limits
    left = limits.token_budget - decodes
    prefills = replica.prefills
    if left <= 0 or not (prefills or replica.waiting):
        return []
    kept = left
    if prefills:
        owed = 0
        for seq in prefills:
            owed += seq.known - seq.computed
            if owed >= left:
                break
        kept = max(left - owed, min(left, -int(-left * limits.share // 1))) if replica.waiting else 0
    old = list(prefills)
    fresh: Chunks = []
    total = decodes
    while kept > 0:
        seq = replica.admit(kept)
        if seq is None:
            break
        take = _fit(seq, kept, total, limits.tile)
        fresh.append((seq, take))
        kept -= take
        left -= take
        total += take
    chunks: Chunks = []
    for seq in old:
        if left <= 0:
            break
        take = _fit(seq, left, total, limits.tile)
        chunks.append((seq, take))
        left -= take
        total += take
    chunks += fresh
    return chunks


def _fit(seq: Sequence, left: int, total: int, tile: int) -> int:
    """Tokens of the next chunk: cut so that the batch total is a multiple of the tile, unless the chunk ends the
    prompt or nothing would be left of it."""
    rest = seq.known - seq.computed
    if rest <= left:
        return rest
    if tile:
        spare = (total + left) % tile
        if spare < left:
            return left - spare
    return left
