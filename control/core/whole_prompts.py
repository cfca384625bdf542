"""Policies that compute a prompt in one iteration, as the systems before Sarathi-Serve did.

Their iterations are bounded too, by the same token budget: it must hold the longest sequence, which may have to be
computed anew as a whole. A prompt that does not fit an iteration any more opens the next.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .policy import Chunks, Policy
from .sequence import Phase, Sequence

if TYPE_CHECKING:
    from .lane import Lane
    from .replica import Replica


class PrefillFirst(Policy):
    """Batches of only prefills or only decodes. Requests are admitted eagerly: while any can be, prompts run and the
    decodes of the lane pause (the paper's Algorithm 2, and vLLM as it knows it)."""

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        chunks = whole_prompts(replica, replica.limits.token_budget)
        if not chunks:
            replica.run_decodes(lane)
        return chunks


class Hybrid(Policy):
    """Prompts run beside the decodes, however long they make the iteration. With ``reserves`` each sequence holds the
    blocks of its maximum length (Orca), else blocks are paged ("hybrid-batching only" of the paper's Table 4)."""

    def __init__(self, reserves: bool) -> None:
        self.reserves = reserves

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        decodes = replica.run_decodes(lane)
        return whole_prompts(replica, replica.limits.token_budget - decodes)


class RequestLevel(Policy):
    """A lane's batch is admitted when the one before has wholly ended; its prompts run first, then its decodes until
    the last of its requests ends (the paper's Algorithm 1, FasterTransformer). Each lane has a batch of its own."""

    def __init__(self, lanes: int) -> None:
        self.reserves = True
        self.stays = True
        self._unread: list[list[Sequence]] = [[] for _ in range(lanes)]  #: of the lane's batch: prompts to compute

    def choose(self, replica: Replica, lane: Lane) -> Chunks:
        # Aborted ones have left the phase.
        unread = [seq for seq in self._unread[lane.index] if seq.phase is Phase.PREFILL]
        room = replica.limits.token_budget
        if not unread and not lane.count:
            most = -(-replica.max_running // replica.stages)
            while len(unread) < most:
                seq = replica.admit(room)
                if seq is None:
                    break
                unread.append(seq)
        chunks: Chunks = []
        for seq in unread:
            rest = (len(seq.tokens) >> 2) - seq.computed
            if rest > room:
                break
            chunks.append((seq, rest))
            room -= rest
        self._unread[lane.index] = unread[len(chunks) :]
        if not chunks:
            replica.run_decodes(lane)
        return chunks


def whole_prompts(replica: Replica, room: int) -> Chunks:
    """Whole prompts of at most ``room`` tokens in all: one that was admitted and did not fit before, then new ones.

    The last one admitted may not fit: then it is the first of the next iteration, and until it has run nobody else is
    admitted. So a long prompt is not passed for ever by shorter ones.
    """
    chunks: Chunks = []
    for seq in replica.prefills:
        rest = (len(seq.tokens) >> 2) - seq.computed
        if rest > room:
            return chunks
        chunks.append((seq, rest))
        room -= rest
    while room > 0:
        new = replica.admit(room)
        if new is None:
            break
        rest = (len(new.tokens) >> 2) - new.computed
        if rest > room:
            break
        chunks.append((new, rest))
        room -= rest
    return chunks
