"""What the control process asks of its surroundings: the time, timers, chance and sockets.

``ControlServer`` reaches nothing of that but through a ``Host``. ``loop_host`` is the real one, around an event loop
and ZeroMQ; the fault simulator has one in virtual time, so that the same server runs in both.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, Protocol

from .options import ControlOptions

#: What became of a message: in the peer's queue, the queue is full, or there is no such peer any more.
Sent = Literal["sent", "full", "gone"]
#: Given the sender's identity and the frames of a message.
Take = Callable[[bytes, list[bytes]], None]


class Timer(Protocol):
    def cancel(self) -> object: ...


class Port(Protocol):
    """A socket with many peers, each known by its identity. What comes is given to whoever opened it."""

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        """Queue a message for a peer, without waiting."""
        ...

    def kick(self) -> object:
        """Look whether something has come of which nothing was told."""
        ...


class Events(Protocol):
    """Where iteration records are published."""

    endpoint: str

    def watched(self) -> bool: ...

    def publish(self, frame: bytes) -> None: ...


class Guard(Protocol):
    """Who decides which peers may dial from other machines."""

    refused: int

    def kick(self) -> object: ...


class Ports(Protocol):
    """All sockets of a control process. ``events`` and ``guard`` only if the options ask for them."""

    @property
    def workers(self) -> Port: ...
    @property
    def clients(self) -> Port: ...
    @property
    def events(self) -> Events | None: ...
    @property
    def guard(self) -> Guard | None: ...

    def close(self) -> None: ...


class Host(Protocol):
    """``now`` is monotonic and ``wall`` the time of day, both in seconds. Timers are called at times of ``now``."""

    @property
    def now(self) -> Callable[[], float]: ...
    @property
    def wall(self) -> Callable[[], float]: ...

    def draw(self, bits: int) -> int:
        """A number that nobody can guess."""
        ...

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> Timer: ...

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> Timer: ...

    def call_soon(self, callback: Callable[..., object], *args: Any) -> object: ...

    def open(self, options: ControlOptions, from_worker: Take, from_client: Take) -> Ports:
        """Bind the sockets. Raises ``EndpointError`` and ``KeyFault``."""
        ...
