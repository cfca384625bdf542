"""Which replica a request goes to: the one that would have the least to do, this request included.

Counted in tokens to be computed: what of the request is not cached there, what is still owed of the prompts that run
or wait there (``Replica.owed``), and ``REQUEST_TOKENS`` for each request that is there, for its decodes. So a cached
prefix attracts by as much as it saves and no more: with requests that all begin alike, which every replica soon has
cached, load decides alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .replica import Replica

#: What a request counts beside its prompt. How long it will decode is not known, nor how much room it then takes from
#: the prompts of others; a row of decode takes about as much of an iteration's time as a few tokens of a chunk, since
#: it reads its KV for one token alone. So this is some tens of its iterations, in which what is owed is worked off.
REQUEST_TOKENS = 64


def owe(replica: Replica, seq: Sequence, owed: int) -> None:
    """``owed`` tokens of ``seq``, which is on ``replica``, are to be computed."""
    replica.owed += owed - seq.owed
    seq.owed = owed


def uncached(replica: Replica, seq: Sequence) -> int:
    """Tokens of ``seq`` that ``replica`` would have to compute if it began now."""
    known = len(seq.tokens) >> 2
    if seq.sampling.prompt_logprobs >= 0:
        # They need every position computed.
        return known
    pool = replica.pool
    return known - pool.match(seq.tokens, seq.salt).blocks * pool.block_size


def route(replicas: list[Replica], seq: Sequence) -> Replica | None:
    """Give ``seq`` to the one of ``replicas`` that would have the least to do, of several that with the lowest
    number; None if there is none."""
    if len(replicas) == 1:
        replicas[0].enqueue(seq, len(seq.tokens) >> 2)
        return replicas[0]
    best, best_owed, least = None, 0, 0
    for replica in replicas:
        owed = uncached(replica, seq)
        load = owed + replica.owed + REQUEST_TOKENS * (len(replica.running) + len(replica.waiting))
        if best is None or load < least or (load == least and replica.index < best.index):
            best, best_owed, least = replica, owed, load
    if best is not None:
        best.enqueue(seq, best_owed)
    return best
