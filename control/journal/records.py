"""What stands in a journal.

A step of the core is one of the events, followed by what came of it: ``Planned`` for each plan, in order, and
``Turned`` for a refusal. ``now`` is the time that the core was told, in seconds of the control process's clock.
Where ids are not recorded, token buffers hold ``Opening.width`` bytes a token instead of four (see ``redaction``).
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from ..core.events import (
    Aborted,
    Due,
    Event,
    Limits,
    OwnerLost,
    ReplicaLost,
    ReplicaUp,
    Returned,
    Submitted,
)
from ..core.slo import Slo, SloClass
from ..wire import Result, Sample, Submit
from ..wire.fields import MAX_SLOTS

#: Raised when a record's meaning changes; fields may be added at the end.
VERSION = 1
#: A client that there never is: an abort of its requests changes nothing.
NOBODY = -1


class Class(Struct, frozen=True):
    """``SloClass``."""

    name: str
    tbt: float
    ttft: float
    chunk: int


class Settings(Struct, frozen=True):
    """``Limits``, by the same names: a field that a journal does not know has the value that it had then."""

    token_budget: Annotated[int, Meta(ge=1)]
    max_num_seqs: Annotated[int, Meta(ge=1)]
    max_model_len: Annotated[int, Meta(ge=1)]
    block_size: Annotated[int, Meta(ge=1)]
    prefix_caching: bool
    tile: Annotated[int, Meta(ge=0)]
    share: float
    overtakes: int
    max_queued: int
    max_queued_tokens: int
    vocab_size: int
    prefix_limit: int
    policy: str
    slo: list[Class] | None
    admission: str
    patience: float
    tenant_weights: list[tuple[str, float]]
    queue_timeout: float
    await_prefix: bool = False
    prefill_replicas: int = 0
    prefill_tokens: int = 2048


def settings_of(limits: Limits) -> Settings:
    """How ``limits`` stand in a journal."""
    values = {name: getattr(limits, name) for name in Settings.__struct_fields__}
    if limits.slo is not None:
        values["slo"] = [Class(c.name, c.tbt, c.ttft, c.chunk) for c in limits.slo.classes]
    values["tenant_weights"] = list(limits.tenant_weights)
    return Settings(**values)


def limits_of(settings: Settings) -> Limits:
    """The reverse of ``settings_of``."""
    values = {name: getattr(settings, name) for name in Settings.__struct_fields__}
    if settings.slo is not None:
        values["slo"] = Slo(tuple(SloClass(c.name, c.tbt, c.ttft, c.chunk) for c in settings.slo))
    values["tenant_weights"] = tuple(settings.tenant_weights)
    return Limits(**values)


class Opening(Struct, array_like=True, frozen=True, tag=1):
    """The first record of a file. ``part`` counts the files of one life of the control process from 0; from the
    second on, the state of the core at its beginning follows in ``Piece`` records. ``width``: bytes of a token.
    ``began``: the time of day, in seconds, when ``now`` was ``clock``."""

    program: str
    part: int
    ids: bool
    width: Annotated[int, Meta(ge=1, le=4)]
    limits: Settings
    began: float
    clock: float
    pieces: int = 0


class Piece(Struct, array_like=True, frozen=True, tag=2):
    """A part of the core's state, as ``image`` writes it."""

    data: bytes


class Came(Struct, array_like=True, frozen=True, tag=3):
    """``Submitted``."""

    now: float
    owner: int
    submit: Submit


class Cancelled(Struct, array_like=True, frozen=True, tag=4):
    """``Aborted``; of ``NOBODY``: an event that changed nothing, such as a submission with a bad field."""

    now: float
    owner: int
    key: int


class Gone(Struct, array_like=True, frozen=True, tag=5):
    """``OwnerLost``."""

    now: float
    owner: int


class Up(Struct, array_like=True, frozen=True, tag=6):
    """``ReplicaUp``."""

    now: float
    replica: int
    epoch: int
    stages: Annotated[int, Meta(ge=1, le=1024)]
    num_blocks: Annotated[int, Meta(ge=1, le=1 << 22)]
    num_slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)]
    profile: list[Sample] = []


class Down(Struct, array_like=True, frozen=True, tag=7):
    """``ReplicaLost``."""

    now: float
    replica: int


class Answered(Struct, array_like=True, frozen=True, tag=8):
    """``Returned``."""

    now: float
    replica: int
    result: Result
    starved_us: int = 0


class Rang(Struct, array_like=True, frozen=True, tag=9):
    """``Due``."""

    now: float


class Planned(Struct, array_like=True, frozen=True, tag=10):
    """A plan that came of the event before: the frames that went to every rank, REGISTERs first, and the digest that
    the ranks' audit must give. Without ids, a REGISTER's are zeros, and its stop ids and biases are left out."""

    replica: int
    frames: list[bytes]
    digest: int | None


class Turned(Struct, array_like=True, frozen=True, tag=11):
    """The submission before was refused."""

    code: str


class Closed(Struct, array_like=True, frozen=True, tag=12):
    """The journal ends here, and why; an empty reason is a proper end."""

    reason: str = ""


#: In the order of the core's events.
Happened = Came | Cancelled | Gone | Up | Down | Answered | Rang
Outcome = Planned | Turned
Record = Opening | Piece | Happened | Outcome | Closed


def event_of(record: Happened) -> Event:
    """The core's event."""
    kind = type(record)
    if kind is Answered:
        return Returned(record.replica, record.result, record.starved_us)  # pyright: ignore
    if isinstance(record, Came):
        return Submitted(record.owner, record.submit)
    if isinstance(record, Cancelled):
        return Aborted(record.owner, record.key)
    if isinstance(record, Gone):
        return OwnerLost(record.owner)
    if isinstance(record, Up):
        r = record
        return ReplicaUp(r.replica, r.epoch, r.stages, r.num_blocks, r.num_slots, r.profile)
    if isinstance(record, Down):
        return ReplicaLost(record.replica)
    return Due()


def record_of(event: Event, now: float) -> Happened:
    """The reverse of ``event_of``."""
    if isinstance(event, Returned):
        return Answered(now, event.replica, event.result, event.starved_us)
    if isinstance(event, Submitted):
        return Came(now, event.owner, event.submit)
    if isinstance(event, Aborted):
        return Cancelled(now, event.owner, event.key)
    if isinstance(event, OwnerLost):
        return Gone(now, event.owner)
    if isinstance(event, ReplicaUp):
        e = event
        return Up(now, e.replica, e.epoch, e.stages, e.num_blocks, e.num_slots, e.profile)
    return Down(now, event.replica) if isinstance(event, ReplicaLost) else Rang(now)
