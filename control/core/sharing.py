"""Chunks aligned with shared prefixes: who begins with what a prompt in progress is computing waits for it.

A block can be shared from the plan on that follows the one which fills it, so of two requests that come together both
would compute what they have in common. With ``Limits.await_prefix`` the second is not admitted before the chunks of
the first have passed the last full block that both have; then it starts at that boundary. The budget goes to the
first meanwhile, or to requests that pass the second as they pass one that does not fit. The wait is bounded: prefills
in progress come first in every iteration, and who is preempted or ends is no longer one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .replica import Replica


def awaits_prefix(replica: Replica, seq: Sequence) -> bool:
    """Whether a prefill in progress will compute more blocks of the prompt of ``seq`` than it has yet."""
    pool = replica.pool
    if not pool.caching or seq.sampling.prompt_logprobs >= 0:
        return False
    size = 4 * pool.block_size
    tokens = seq.tokens
    first = tokens[:size]
    # At least one token is computed by each.
    most = ((len(tokens) >> 2) - 1) // pool.block_size
    for other in replica.prefills:
        if other.salt != seq.salt or other.tokens[:size] != first:
            continue
        done = other.computed // pool.block_size
        if done < most and other.tokens[: (done + 1) * size] == tokens[: (done + 1) * size]:
            return len(other.tokens) >= (done + 1) * size
    return False
