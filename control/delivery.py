"""What the control process tells its clients. Sans-I/O: ``send`` puts a frame into a client's queue and never waits.

Every client has a queue of its own. While one is full, its ticks are merged (``merging``) and tried again by and by;
the others' go out as ever. A client that is gone, or for which too much waits, is doomed: it is cut off by who calls,
after the effects at hand have been told, since ending its requests is an event of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from .core.events import Delivered
from .fanout import Fanout
from .host import Sent
from .merging import Waiting
from .sessions import Session, Sessions
from .wire import Tick, decode_to_client

Why = Literal["slow", "silent", "gone"]


class Delivery:
    """``send(identity, frames)`` queues a message; ``wake()`` is called when ``doomed`` or ``slow`` have grown."""

    def __init__(
        self, sessions: Sessions, send: Callable[[bytes, list[bytes]], Sent], wake: Callable[[], None]
    ) -> None:
        self.sessions = sessions
        self.fanout = Fanout()
        #: Clients to be cut off, and why.
        self.doomed: list[tuple[Session, Why, str]] = []
        #: Clients whose queue is full.
        self.slow: dict[int, Session] = {}
        self.cut: dict[Why, int] = {"slow": 0, "silent": 0, "gone": 0}
        self.ticks_merged = 0
        self._send = send
        self._wake = wake

    def deliver(self, delivered: Delivered, now: float) -> None:
        """Tell the clients concerned of an iteration's tokens and ends."""
        by_owner, send = self.sessions.by_owner, self._send
        for owner, frame in self.fanout.frames(delivered):
            session = by_owner.get(owner)
            if session is None or session.doomed:
                continue
            if session.waiting is None:
                # There may be thousands of these a second: no more is done about one than must be.
                sent = send(session.identity, [frame])
                if sent == "sent":
                    continue
                if sent == "gone":
                    self._gone(session)
                    continue
            tick = decode_to_client(frame)
            assert isinstance(tick, Tick)
            self._merge(session, tick, now)

    def answer(self, session: Session, frame: bytes, now: float) -> None:
        """Tell a client what it asked for: not lost while the client is there."""
        if session.doomed:
            return
        if session.waiting is None:
            if self._put(session, frame):
                return
            if session.doomed:
                return
            self._wait(session, None, now)
        assert session.waiting is not None
        session.waiting.answer(frame)
        self._judge(session, now)

    def describe(self, session: Session, what: str, frame: bytes, now: float) -> None:
        """Tell a client the present state of something: a newer description replaces one that waits."""
        if session.doomed:
            return
        if session.waiting is None:
            if self._put(session, frame) or session.doomed:
                return
            self._wait(session, None, now)
        assert session.waiting is not None
        session.waiting.describe(what, frame)
        self._judge(session, now)

    def retry(self, now: float) -> None:
        """Try again the queues that were full, where it is time to."""
        for session in list(self.slow.values()):
            waiting = session.waiting
            assert waiting is not None
            if now < waiting.due or session.doomed:
                continue
            if waiting.flush(lambda frame, session=session: self._put(session, frame), now):
                self.fanout.renumber(session.owner, waiting.sequence)
                session.waiting = None
                del self.slow[session.owner]
            elif not session.doomed:
                self._judge(session, now)

    def doom(self, session: Session, why: Why, reason: str) -> None:
        """Send nothing more to a client, and have it cut off."""
        if not session.doomed:
            session.doomed = True
            self.cut[why] += 1
            self.doomed.append((session, why, reason))
            self._wake()

    def forget(self, session: Session) -> None:
        """The client is gone, and its requests have ended."""
        self.slow.pop(session.owner, None)
        self.fanout.forget(session.owner)

    def figures(self) -> dict[str, float]:
        """Counters and gauges."""
        return {
            "clients_slow": len(self.slow),
            "client_waiting_tokens": sum(s.waiting.tokens for s in self.slow.values() if s.waiting is not None),
            "client_ticks_merged_total": self.ticks_merged,
            "clients_cut_slow_total": self.cut["slow"],
            "clients_cut_silent_total": self.cut["silent"],
            "clients_gone_total": self.cut["gone"],
        }

    def _merge(self, session: Session, tick: Tick, now: float) -> None:
        waiting = session.waiting
        if waiting is None:
            self._wait(session, tick, now)
        else:
            waiting.hold(tick)
        self.ticks_merged += 1
        self._judge(session, now)

    def _wait(self, session: Session, tick: Tick | None, now: float) -> None:
        fanout, owner = self.fanout, session.owner
        sequence = fanout.sent(owner) if tick is None else tick.sequence
        session.waiting = Waiting(now, fanout.owned_by(owner), tick, sequence)
        self.slow[owner] = session
        self._wake()

    def _judge(self, session: Session, now: float) -> None:
        assert session.waiting is not None
        reason = session.waiting.overdue(now)
        if reason is not None:
            self.doom(session, "slow", reason)

    def _put(self, session: Session, frame: bytes) -> bool:
        sent = self._send(session.identity, [frame])
        if sent == "gone":
            self._gone(session)
        return sent == "sent"

    def _gone(self, session: Session) -> None:
        self.doom(session, "gone", "its connection is gone")
