"""What bounds a server: the limits that were asked for, within what its workers can do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import structlog

from .core.bounds import WHOLE_PROMPTS, iteration_tokens
from .core.events import Limits
from .wire import Hello

log = structlog.get_logger("evenflow.control")


def settle_limits(
    wanted: Limits, hellos: Sequence[Hello], num_blocks: int, stages: int, model_len: int | None
) -> Limits:
    """The effective limits, from the hellos of the first replica that is complete; what is lowered is logged.

    ``num_blocks``: those of its pool. ``model_len``: the longest sequence that was asked for, if any was.
    """
    first = hellos[0]
    length = min(first.max_model_len, model_len or first.max_model_len)
    pool = num_blocks * first.block_size
    if length > pool:
        log.warning("max model length lowered to what the block pool holds", asked=length, now=pool)
        length = pool
    most = min(h.max_tokens for h in hellos)
    if wanted.policy in WHOLE_PROMPTS and length > most:
        log.warning(
            "max model length lowered to the workers' tokens an iteration: the policy computes prompts whole",
            policy=wanted.policy,
            asked=length,
            now=most,
        )
        length = most
    asked = iteration_tokens(wanted.policy, wanted.token_budget, length, wanted.max_num_seqs)
    budget = min(asked, most)
    if budget < asked:
        log.warning("token budget lowered to the workers' limit", asked=asked, now=budget)
    seqs = min(wanted.max_num_seqs, budget * stages, *(h.num_slots for h in hellos))
    if seqs < wanted.max_num_seqs:
        log.warning("max-num-seqs lowered to token-budget x stages", asked=wanted.max_num_seqs, now=seqs)
    if wanted.prefix_caching:
        log.info("prefix cache on: prompts share full blocks", shortest_prefix_tokens=first.block_size)
    return replace(
        wanted,
        token_budget=budget,
        max_num_seqs=seqs,
        max_model_len=length,
        block_size=first.block_size,
        tile=first.tile,
        vocab_size=first.vocab_size,
        prefix_limit=first.prefix_limit,
    )
