"""The clients of the control process. Sans-I/O: who is connected, and what bounds them.

A client is named by its socket identity and numbered for the core. One that is silent, or that reads so slowly that
what waits for it passes a limit, is cut off: its requests end and its slots are free, everybody else goes on. A
client that comes back, under whatever identity, names its old session by the secret that it was given: the old one
ends at once, so that no request of it runs twice.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from .merging import Waiting

#: A client that was silent for this long is gone. Clients ping once a second.
SILENCE_S = 10.0
#: Clients at a time.
MAX_CLIENTS = 4096
#: Unfinished requests of one client.
MAX_REQUESTS = 8192
#: Clients that have status messages sent to them.
MAX_SUBSCRIBERS = 256


@dataclass(slots=True)
class Session:
    """One client."""

    owner: int
    identity: bytes
    seen: float
    name: str = ""
    #: Named by the client when it must say hello again. Never logged.
    secret: int = 0
    #: What its queue had no room for.
    waiting: Waiting | None = None
    #: It is being cut off: nothing more is sent to it.
    doomed: bool = False
    #: Seconds between status messages it subscribed to, and when the next is due.
    interval: float = 0.0
    due: float = 0.0
    #: Unfinished requests in each of them, at most.
    rows: int = 0


class Sessions:
    """All clients, by identity and by number."""

    def __init__(self, draw: Callable[[], int] = lambda: secrets.randbits(62) + 1) -> None:
        self.by_identity: dict[bytes, Session] = {}
        self.by_owner: dict[int, Session] = {}
        self._by_secret: dict[int, Session] = {}
        self._numbers = 0
        self._draw = draw

    def open(self, identity: bytes, name: str, now: float, secret: int = 0) -> tuple[Session, list[Session]]:
        """A client said hello: its new session, and those it had before, whose requests are to be ended: that of the
        same connection and the one named by ``secret``, if there are such."""
        before = {s.owner: s for s in (self.by_identity.get(identity), self._by_secret.get(secret)) if s is not None}
        for old in before.values():
            self.close(old)
        session = Session(self._numbers, identity, now, name, self._draw())
        self._numbers += 1
        self.by_identity[identity] = session
        self.by_owner[session.owner] = session
        self._by_secret[session.secret] = session
        return session, list(before.values())

    def close(self, session: Session) -> None:
        self.by_identity.pop(session.identity, None)
        self.by_owner.pop(session.owner, None)
        self._by_secret.pop(session.secret, None)

    def silent(self, now: float) -> list[Session]:
        """Those that must be gone."""
        return [s for s in self.by_owner.values() if now - s.seen > SILENCE_S]

    @property
    def subscribers(self) -> int:
        """Clients that have status messages sent to them."""
        return sum(session.interval > 0 for session in self.by_owner.values())
