"""The control process's life: the real ``ControlServer`` on virtual time, ticked as ``serve`` does, and restarted."""

from collections import deque
from collections.abc import Callable
from random import Random
from typing import Any

from evenflow.control.host import Take
from evenflow.control.options import ControlOptions
from evenflow.control.server import TICK_S, ControlServer
from evenflow.control.wire import Abort, decode_from_client, decode_record, encode

from .clients import Violation
from .clock import Clock, Entry
from .network import Frames, Network, Router

#: How every Abort begins: the number of its fields, and its tag.
_ABORT = encode(Abort(0))[:2]


class Records:
    """The ``events`` socket, with somebody who listens now and then."""

    def __init__(self) -> None:
        self.endpoint = "virtual"
        self.heard = False
        self.published = 0

    def watched(self) -> bool:
        return self.heard

    def publish(self, frame: bytes) -> None:
        decode_record(frame)
        self.published += 1


class VirtualPorts:
    def __init__(self, workers: Router, clients: Router, events: Records, closing: Callable[[], None]) -> None:
        self.workers, self.clients, self.events, self.guard = workers, clients, events, None
        self.close = closing


class VirtualHost:
    """One life of a control process. While it is stopped (SIGSTOP), what is due and what comes waits in order."""

    def __init__(
        self,
        clock: Clock,
        net: Network,
        random: Random,
        capacity: int,
        after_abort: Callable[[bytes, bytes], None],
    ) -> None:
        self.after_abort = after_abort
        self.now, self.wall = clock.read, clock.wall
        self.alive, self.stopped, self.touched = True, False, False
        self.records = Records()
        self._clock, self._net, self._random, self._capacity = clock, net, random, capacity
        self._backlog: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()

    def draw(self, bits: int) -> int:
        return self._random.getrandbits(bits)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> "Due":
        return Due(self, self._clock, when, callback, args)

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> "Due":
        return Due(self, self._clock, self._clock.now + delay, callback, args)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> "Due":
        return Due(self, self._clock, self._clock.now, callback, args)

    def run(self, callback: Callable[..., object], *args: Any) -> None:
        """Call into the process, if it lives, and once it runs."""
        if not self.alive:
            return
        if self.stopped:
            self._backlog.append((callback, args))
            return
        self.touched = True
        callback(*args)

    def resume(self) -> None:
        self.stopped = False
        while self._backlog and self.alive and not self.stopped:
            callback, args = self._backlog.popleft()
            self.run(callback, *args)

    def open(self, options: ControlOptions, from_worker: Take, from_client: Take) -> VirtualPorts:
        def from_client_seen(identity: bytes, frames: Frames) -> None:
            from_client(identity, frames)
            if frames[0].startswith(_ABORT):
                self.after_abort(identity, frames[0])

        workers = Router(self._net, lambda identity, frames: self.run(from_worker, identity, frames), 65_536)
        clients = Router(
            self._net, lambda identity, frames: self.run(from_client_seen, identity, frames), self._capacity
        )
        self._net.bind("workers", workers)
        self._net.bind("clients", clients)
        return VirtualPorts(workers, clients, self.records, self.die)

    def die(self) -> None:
        if self.alive:
            self.alive = False
            self._net.unbind("workers")
            self._net.unbind("clients")


class Due:
    """A timer; one that is cancelled while its process is stopped is not called later."""

    __slots__ = ("_args", "_callback", "_entry", "_host")

    def __init__(
        self, host: VirtualHost, clock: Clock, when: float, callback: Callable[..., object], args: tuple[Any, ...]
    ) -> None:
        self._host = host
        self._callback: Callable[..., object] | None = callback
        self._args = args
        self._entry: Entry = clock.at(when, host.run, self._call)

    def _call(self) -> None:
        if self._callback is not None:
            self._callback(*self._args)

    def cancel(self) -> None:
        self._callback = None
        self._entry.cancel()


class Control:
    """``launch`` begins a life; ``server`` is None between two."""

    def __init__(self, clock: Clock, net: Network, random: Random, options: ControlOptions, capacity: int) -> None:
        self.options = options
        self.server: ControlServer | None = None
        self.host: VirtualHost | None = None
        self.lives = 0
        self.watched = False
        self._clock, self._net, self._random, self._capacity = clock, net, random, capacity

    def launch(self) -> None:
        self.lives += 1
        host = self.host = VirtualHost(self._clock, self._net, self._random, self._capacity, self._after_abort)
        host.records.heard = self.watched
        self.server = ControlServer(self.options, host)
        host.run(self._tick, self.server, host)

    def _after_abort(self, identity: bytes, frame: bytes) -> None:
        """Nothing of a request may be left when its abort has been taken in."""
        message, server = decode_from_client(frame), self.server
        assert isinstance(message, Abort) and server is not None
        session = server.sessions.by_identity.get(identity)
        if session is None or server.engine is None:
            return
        if message.key in server.engine.requests.get(session.owner, {}):
            raise Violation(f"{session.name}: request {message.key} goes on after its abort")

    def _tick(self, server: ControlServer, host: VirtualHost) -> None:
        if not server.stopped.is_set():
            server.tick()
            host.call_later(TICK_S, self._tick, server, host)

    def die(self) -> None:
        assert self.host is not None
        self.host.die()
        self.server = None
