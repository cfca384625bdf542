"""One sequence and what the core knows of it.

A sequence has *known* tokens (prompt and sampled) and *computed* tokens (those whose KV is, or is planned to be, in
the cache). Chunked prefill, a prefix hit, a decode, a recompute after preemption and a recovery after a crash are all
the same: computed moves toward known.

While a sequence decodes, nothing of it is touched per iteration: its position follows from the tick of its lane
(``lane.Lane``), its newest tokens lie in the lane's ring, and ``tokens`` lags behind until the sequence leaves.
"""

from __future__ import annotations

from enum import IntEnum
from math import inf
from typing import TYPE_CHECKING

from ..wire import Sampling, Submit
from ..wire.fields import MAX_TOKENS

if TYPE_CHECKING:
    from .blocks import Node
    from .fair import Account
    from .lane import Lane


class Phase(IntEnum):
    """Where a sequence is; each is in exactly one place."""

    WAITING = 0  #: in a waiting queue, holds no block
    PREFILL = 1  #: admitted, has blocks for all its known tokens, chunks are being planned
    DECODE = 2  #: in a lane, gains a token each time the lane ticks
    SETTLING = 3  #: left its lane, blocks released, results of plans that name it are still in flight
    DONE = 4  #: finished; results that still come are void


class Holder:
    """Blocks of a replica's pool that somebody holds."""

    __slots__ = ("dups", "named", "node", "table")

    def __init__(self) -> None:
        self.table: list[int] = []
        self.node: Node | None = None  #: deepest node of the prefix tree on which a reference is held
        self.named = 0  #: blocks of the table, from its start, that stand in the tree or in ``dups``
        self.dups: list[int] = []  #: own copies of blocks that a twin had named first


class Sequence(Holder):
    """A request's single sequence, in the order of arrival (``order``) among all."""

    __slots__ = (
        "account",
        "arrived",
        "bucket",
        "cached",
        "chunk",
        "column",
        "computed",
        "deaths",
        "doubt_len",
        "end_tick",
        "first_due",
        "generation",
        "join_known",
        "join_tick",
        "key",
        "lane",
        "max_len",
        "min_len",
        "order",
        "owed",
        "owner",
        "passed",
        "pending",
        "phase",
        "place",
        "priority",
        "prompt_len",
        "request",
        "salt",
        "sampling",
        "slot",
        "stop_ids",
        "tbt",
        "tokens",
        "told",
    )

    def __init__(self, order: int, owner: int, submit: Submit, max_len: int) -> None:
        super().__init__()
        self.order = order
        # in the admission order
        self.arrived = 0.0  #: when it came (seconds)
        self.place: tuple[float, int] = (0.0, order)  #: the smaller is taken earlier
        self.priority = 0  #: base priority, the smaller the more urgent
        self.account: Account | None = None  #: its tenant's, if the order keeps any
        self.owner = owner  #: the client, as numbered by the shell
        self.key = submit.key  #: the client's name for the request
        self.request = submit.request
        self.tokens = bytes(submit.tokens)  #: u32 little-endian, the known ids that have been collected
        self.prompt_len = submit.prompt_len
        self.max_len = max_len  #: prompt and output, at most
        # No sequence is longer, so what is beyond means the same: and this is what a message can say.
        self.min_len = min(submit.prompt_len + submit.min_tokens, MAX_TOKENS)
        self.sampling: Sampling = submit.sampling
        self.stop_ids = submit.stop_ids
        self.salt = submit.salt
        self.tbt = inf  #: most seconds between its tokens, if that is promised
        self.chunk = 0  #: most prompt tokens of it in an iteration, 0 for any
        self.first_due = inf  #: when its first token should be there
        self.told = 1  #: first prompt token whose log-probability has not been told, if they are wanted
        self.phase = Phase.WAITING
        self.computed = 0  #: up to date in PREFILL only; see ``planned``
        self.owed = 0  #: tokens still to be computed, while it waits on a replica (as far as is known) or in PREFILL
        self.cached = 0  #: tokens found in the prefix cache at the first admission
        self.deaths = 0  #: times a worker died with this sequence in the running iteration
        self.doubt_len = 0  #: known length at the last such death
        self.passed = 0  #: times a younger request was admitted before it
        self.slot = -1
        self.generation = 0
        self.pending = 0  #: in-flight plans whose result this sequence collects itself
        # place in a lane
        self.lane: Lane | None = None
        self.join_tick = 0  #: first tick at which it decodes
        self.join_known = 0  #: tokens known (one perhaps still being sampled) at that tick
        self.end_tick = 0  #: tick that samples its last token by length
        self.bucket = -1  #: tick modulo block size at which it needs a new block, -1: it has all it can need
        self.column = 0  #: first tick whose token has not been collected from the ring

    @property
    def known(self) -> int:
        """Tokens collected so far."""
        return len(self.tokens) >> 2

    @property
    def planned(self) -> int:
        """Tokens whose KV is in the cache once all plans made so far have run."""
        lane = self.lane
        return self.computed if lane is None else self.join_known - 1 + lane.tick - self.join_tick

    @property
    def received(self) -> int:
        """Prompt tokens, and those of all results that have come, also if they were not collected yet."""
        lane = self.lane
        if lane is None or lane.done <= self.join_tick:
            # Also the token with which it joined may still be on its way.
            return self.known
        return self.join_known + lane.done - self.join_tick

    def __repr__(self) -> str:
        return f"<sequence {self.order} {self.phase.name} known={self.known} slot={self.slot}>"
