"""What goes into the core and what comes out of it.

These are made by the thousand each second: structs, since a frozen dataclass costs several times as much to make.
Events have tags, so that a journal can hand them on as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from ..wire import BatchPlan, Logprobs, Register, Result, Sample, Submit
from .sequence import Sequence
from .slo import Slo


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds the core's choices for one replica.

    ``policy``: what goes into an iteration, one of ``bounds.POLICIES``. ``token_budget`` (τ): tokens in an iteration.
    ``tile``: the batch total that the device computes without waste, 0 for any. ``share``: the part of an iteration's
    prefill tokens kept for the next requests in admission order.
    ``prefix_limit``: longer prompts share cached blocks only with prompts of their own length; 0: no such limit.
    ``slo``: with it, iterations are bounded by time and ``token_budget`` is only what workers can compute.
    ``max_num_seqs``: admitted sequences of a replica. ``overtakes``: how often a blocked head may be passed.
    ``admission``: the order, one of ``bounds.ADMISSIONS``. ``patience`` (seconds): what a step of priority is worth
    in waiting, or the deadline of requests that name none. ``tenant_weights``: of tenants whose weight is not 1.
    ``queue_timeout`` (seconds): a request that has not run by then ends; 0 for never.
    """

    token_budget: int = 256
    max_num_seqs: int = 256
    max_model_len: int = 8192
    block_size: int = 16
    prefix_caching: bool = True
    tile: int = 0
    share: float = 0.25
    overtakes: int = 32
    max_queued: int = 4096
    max_queued_tokens: int = 8 << 20
    vocab_size: int = 1 << 32
    prefix_limit: int = 0
    policy: str = "stall-free"
    slo: Slo | None = None
    admission: str = "fcfs"
    patience: float = 60.0
    tenant_weights: tuple[tuple[str, float], ...] = ()
    queue_timeout: float = 0.0
    #: Who begins with what another's prompt is computing waits for that (see ``sharing``).
    await_prefix: bool = False
    #: Replicas, the first by index, that compute prompts for the others to decode (see ``migration``), with so many
    #: tokens in an iteration. 0: each replica does both. No worker can move blocks: for simulations.
    prefill_replicas: int = 0
    prefill_tokens: int = 2048


class Submitted(Struct, array_like=True, frozen=True, tag=3):
    """A client asks for a completion."""

    owner: int
    submit: Submit


class Aborted(Struct, array_like=True, frozen=True, tag=4):
    """A client ends its request."""

    owner: int
    key: int


class OwnerLost(Struct, array_like=True, frozen=True, tag=5):
    """A client is gone: all its requests end."""

    owner: int


class ReplicaUp(Struct, array_like=True, frozen=True, tag=6):
    """All ranks of a replica are ready for the plans of ``epoch``. ``profile``: what its slowest stage measured."""

    replica: int
    epoch: int
    stages: int
    num_blocks: int
    num_slots: int
    profile: list[Sample] = []


class ReplicaLost(Struct, array_like=True, frozen=True, tag=7):
    """A replica's epoch is over: a worker died, hung, or was out of step."""

    replica: int


class Returned(Struct, array_like=True, frozen=True, tag=8):
    """A result of the last stage's first rank."""

    replica: int
    result: Result
    #: For how long, at most, an earlier stage waited for a plan since the result before.
    starved_us: int = 0


class Due(Struct, array_like=True, frozen=True, tag=9):
    """The time that a ``Wake`` named has come. At any other time it changes nothing."""


class Moved(Struct, array_like=True, frozen=True, tag=13):
    """The blocks of a ``Move`` have come."""

    move: int


Event = Submitted | Aborted | OwnerLost | ReplicaUp | ReplicaLost | Returned | Due | Moved


class SendPlan(Struct, frozen=True):
    """Send ``registers`` and ``plan``, as the frames of one message, to every rank of the replica.

    ``digest`` is what each rank's audit must give at this step, None where none is due.
    """

    replica: int
    registers: list[Register]
    plan: BatchPlan
    digest: int | None
    #: For records and time limits: tokens of the batch, decodes among them, KV tokens read.
    tokens: int
    decodes: int
    kv_tokens: int
    #: Of the iteration on one stage; 0 without a model of it.
    predicted_us: int = 0
    #: Pairs of a chunk's token and a token that it attends to.
    attention: float = 0.0
    #: For the account of idle time: for how long there had been nothing to plan, the latest step whose ids its
    #: decodes take (-1: none), and lanes for which there was nothing to run.
    dry_us: int = 0
    awaits: int = -1
    spare: int = 0


class Ended(Struct, frozen=True):
    """``seq`` no longer owns ``slot`` (-1: it owned none). ``paused`` means that it will go on later."""

    seq: Sequence
    slot: int
    reason: str
    message: str = ""


class Delivered(Struct):
    """The tokens of one iteration.

    ``live`` is the bitmap of slots that have one; ``ids`` is indexed by slot; ``sole`` is the only client concerned,
    or -1 if there may be several. ``starts`` own the slot from this iteration on; ``ends`` follow the tokens.
    ``logprobs`` may also be of others, and of prompts that this iteration computed a part of.
    """

    replica: int
    step: int
    live: bytes | bytearray
    ids: bytes | memoryview
    sole: int
    starts: list[tuple[int, Sequence]] = []
    ends: list[Ended] = []
    logprobs: list[tuple[Sequence, Logprobs]] = []


class Rejected(Struct, frozen=True):
    """A submission is refused: nothing of it is kept."""

    owner: int
    key: int
    code: str
    field: str
    message: str
    retry_after_ms: int = 0


class OutOfStep(Struct, frozen=True):
    """A rank's answer contradicts the plans: the replica's epoch must end."""

    replica: int
    reason: str


class Wake(Struct, frozen=True):
    """Step with ``Due`` at ``at`` (seconds, on the clock of ``now``), instead of at the time asked for before."""

    at: float


class Move(Struct, frozen=True):
    """Copy the KV of ``tokens`` tokens from a replica to another, and step with ``Moved`` when they are there."""

    move: int
    source: int
    target: int
    tokens: int


Effect = SendPlan | Delivered | Rejected | OutOfStep | Wake | Move
