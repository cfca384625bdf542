"""What a control process is started with."""

from __future__ import annotations

from dataclasses import dataclass

from .core.events import Limits
from .sessions import MAX_REQUESTS
from .wire.keys import Role

#: Bytes that a journal takes at most, unless told.
JOURNAL_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class Door:
    """A ``tcp://`` endpoint for workers or clients. ``listener``: the descriptor of a socket that listens there."""

    role: Role
    endpoint: str
    listener: int | None = None


@dataclass(frozen=True, slots=True)
class ControlOptions:
    """What the control process is started with. ``limits`` are wishes until the workers have said theirs.

    ``workers`` and ``clients`` are ``ipc://`` endpoints. For other machines: ``doors``, and the folder of ``keys``.
    """

    workers: str
    clients: str
    links: str
    limits: Limits
    replicas: int = 1
    stages: int = 1
    max_model_len: int | None = None
    hang_timeout: float = 15.0
    drain_timeout: float = 30.0
    model_name: str | None = None
    #: Unfinished requests that one client may have.
    max_requests: int = MAX_REQUESTS
    #: Replicas whose workers are started by hand.
    external: tuple[int, ...] = ()
    doors: tuple[Door, ...] = ()
    keys: str | None = None
    insecure: bool = False
    events: str = ""  #: where to publish iteration records; nowhere if empty
    #: The file that the core's events and plans are recorded in, none if empty; whether with token ids; and the most
    #: bytes that it and the file before it may have.
    journal: str = ""
    journal_ids: bool = False
    journal_size: int = JOURNAL_BYTES
    log_level: str = "info"
