"""The clients of the control process. Sans-I/O: who is connected, what each was told, what waits to be sent.

A client is named by its socket identity and numbered for the core. One that is silent, or that reads so slowly that
its backlog passes a limit, is cut off: its requests end and its slots are free, everybody else goes on.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

#: A client that was silent for this long is gone. Clients ping once a second.
SILENCE_S = 10.0
#: Frames that wait for a client which does not read.
MAX_BACKLOG = 4096


@dataclass(slots=True)
class Session:
    """One client."""

    owner: int
    identity: bytes
    seen: float
    name: str = ""
    #: Frames that its queue had no room for, oldest first.
    backlog: deque[bytes] = field(default_factory=deque[bytes])
    #: Seconds between status messages it subscribed to, and when the next is due.
    interval: float = 0.0
    due: float = 0.0


class Sessions:
    """All clients, by identity and by number."""

    def __init__(self) -> None:
        self.by_identity: dict[bytes, Session] = {}
        self.by_owner: dict[int, Session] = {}
        self._numbers = 0

    def open(self, identity: bytes, name: str, now: float) -> tuple[Session, Session | None]:
        """A client said hello: its new session, and the one it had before, whose requests are to be ended."""
        old = self.by_identity.get(identity)
        if old is not None:
            self.close(old)
        session = Session(self._numbers, identity, now, name)
        self._numbers += 1
        self.by_identity[identity] = session
        self.by_owner[session.owner] = session
        return session, old

    def close(self, session: Session) -> None:
        self.by_identity.pop(session.identity, None)
        self.by_owner.pop(session.owner, None)

    def silent(self, now: float) -> list[Session]:
        """Those that must be gone."""
        return [s for s in self.by_owner.values() if now - s.seen > SILENCE_S]
