"""Chunks for an iteration whose budget is in seconds (``budget``), by the order of the stall-free policy."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .budget import LEAST_CHUNK, LEAST_START, TURN, Budget, Hurry
from .policy import Chunks
from .timing import attention_work

if TYPE_CHECKING:
    from .replica import Replica
    from .sequence import Sequence


def timed_chunks(replica: Replica, budget: Budget, decodes: int, kv_tokens: int) -> Chunks:
    """Choose chunks for an iteration that already holds ``decodes``, which read ``kv_tokens``; admits requests as a
    side effect.

    As with a fixed budget: prefills in progress come first, oldest first, and a share is kept for the next requests.
    But all shares are seconds, and become tokens by the context of each sequence.
    """
    prefills = replica.prefills
    if not replica.waiting:
        budget.kept_out = 0
        if not prefills:
            return []
    first = prefills[0].computed if prefills else 0
    if not budget.open(decodes, kv_tokens, first, bool(prefills), _hurry(replica) if budget.hurries else None):
        return []
    left = budget.seconds
    kept = left
    if prefills:
        owed = 0.0
        for seq in prefills:
            owed += budget.chunk_s((len(seq.tokens) >> 2) - seq.computed, seq.computed)
            if owed >= left:
                break
        kept = max(left - owed, left * replica.limits.share if replica.waiting else 0.0)
        if budget.kept_out >= TURN:
            kept = left
    old = list(prefills)
    chunks: Chunks = []
    fresh: Chunks = []
    if budget.admits:
        while True:
            size = budget.chunk_tokens(kept, 0)
            if size < LEAST_START and (fresh or (old and budget.kept_out < TURN)):
                break
            new = replica.admit(size) if size else None
            if new is None:
                break
            budget.kept_out = 0
            # At least one token, however much of it is cached.
            taken = _grant(budget, new, kept) or 1
            fresh.append((new, taken))
            spent = budget.chunk_s(taken, new.computed)
            kept -= spent
            left -= spent
    for seq in old:
        if budget.tokens <= 0:
            break
        taken = _grant(budget, seq, left)
        if taken < LEAST_CHUNK and seq.computed + taken < len(seq.tokens) >> 2:
            # What is left is not worth a chunk. The first gets one, however much it costs with its context.
            if chunks or fresh:
                break
            taken = taken or 1
        chunks.append((seq, taken))
        left -= budget.chunk_s(taken, seq.computed)
    chunks += fresh
    if budget.tile and chunks:
        _align(budget, chunks, decodes, kv_tokens)
    return chunks


def _grant(budget: Budget, seq: Sequence, seconds: float) -> int:
    """Tokens of the next chunk of ``seq``, at most what ``seconds`` allow; they are taken from ``budget.tokens``."""
    taken = min((len(seq.tokens) >> 2) - seq.computed, budget.chunk_tokens(seconds, seq.computed))
    if 0 < seq.chunk < taken:
        taken = seq.chunk
    budget.tokens -= taken
    return taken


def _align(budget: Budget, chunks: Chunks, decodes: int, kv_tokens: int) -> None:
    """Cut the largest chunk that does not end its prompt so that the batch total is a multiple of the tile. If all
    end theirs, one is cut only if the tile, filled up, would take too long."""
    total, attention, at, most = decodes, 0.0, -1, 0
    for i, (seq, taken) in enumerate(chunks):
        total += taken
        attention += attention_work(seq.computed, taken)
        if taken > most and seq.computed + taken < len(seq.tokens) >> 2:
            at, most = i, taken
    spare = total % budget.tile
    if not spare:
        return
    if at < 0 and budget.overruns(total - decodes, attention, decodes, kv_tokens):
        at = max(range(len(chunks)), key=lambda i: chunks[i][1])
    if at >= 0:
        seq, taken = chunks[at]
        if taken > spare:
            chunks[at] = (seq, taken - spare)


def _hurry(replica: Replica) -> Hurry:
    hurry = Hurry()
    owed = 0
    for seq in replica.prefills:
        owed += (len(seq.tokens) >> 2) - seq.computed
        if seq.first_due < 1e300:
            hurry.waits.append((owed, seq.first_due))
    waiting = replica.waiting
    if waiting:
        head = waiting.head()
        hurry.waits.append((owed + head.known, head.first_due))
        hurry.waits.append((owed + waiting.tokens, waiting.tail().first_due))
    return hurry
