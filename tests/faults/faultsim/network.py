"""ZeroMQ as the control process and its peers see it, in virtual time.

What is modelled, since the transport allows it:

- A connection keeps order in each direction; between connections there is none. Every message takes its own time.
- A peer that dies, or a connection that breaks, takes with it the end of what is under way: a prefix arrives. Each
  side notices after a time of its own, and what it sends until then is lost without a word.
- A DEALER dials again by itself and keeps what it could not send. One with a name comes back under it, and replaces
  itself (handover); one without comes back as a stranger.
- A ROUTER says that a peer is not there, or that its queue is full: nothing is dropped in silence.
- A peer that vanished (its machine lost power) is not noticed at all.

Not modelled, since ZeroMQ does none of it: damage to a frame, a gap in the middle of a connection, a reordering in
it, a duplicate. ``replay`` breaks the last rule on purpose, for what the product promises beyond it.
"""

from collections import deque
from collections.abc import Callable
from random import Random

from evenflow.control.host import Sent

from .clock import Clock

Frames = list[bytes]


class Connection:
    """Between a ROUTER and a DEALER; its two directions are 0, to the DEALER, and 1, to the ROUTER."""

    __slots__ = ("alive", "arrived", "due", "end", "identity", "limit", "net", "router", "sent")

    def __init__(self, net: "Network", router: "Router", end: "Dealer", identity: bytes) -> None:
        self.net, self.router, self.end, self.identity = net, router, end, identity
        self.alive = True
        self.sent, self.arrived, self.due = [0, 0], [0, 0], [0.0, 0.0]
        self.limit: list[int] | None = None

    def send(self, way: int, frames: Frames) -> None:
        self.sent[way] += 1
        net = self.net
        due = self.due[way] = max(net.clock.now + net.delay(self.end), self.due[way])
        net.clock.at(due, self._arrive, way, frames, self.sent[way])

    def _arrive(self, way: int, frames: Frames, number: int) -> None:
        if self.limit is not None and number > self.limit[way]:
            return
        self.arrived[way] = number
        if way:
            self.router.arrived(self.identity, frames)
        else:
            self.end.arrived(self, frames)

    def cut(self, *, unnoticed: bool = False) -> None:
        """The connection ends. ``unnoticed``: nobody is told of it, as when a machine loses power."""
        if not self.alive:
            return
        self.alive = False
        net = self.net
        draw = net.random.randint
        self.limit = [done + draw(0, sent - done) for sent, done in zip(self.sent, self.arrived, strict=True)]
        if not unnoticed:
            net.clock.after(net.notice(), self.router.lost, self)
            net.clock.after(net.notice(), self.end.lost, self)


class Router:
    """The control process's end. ``capacity``: messages that may be under way to one peer, and unread by it."""

    def __init__(self, net: "Network", take: Callable[[bytes, Frames], None], capacity: int) -> None:
        self._take = take
        self._capacity = capacity
        self.peers: dict[bytes, Connection] = {}
        self.closed = False

    def send(self, identity: bytes, frames: Frames) -> Sent:
        peer = self.peers.get(identity)
        if peer is None:
            return "gone"
        if peer.sent[0] - peer.arrived[0] + len(peer.end.inbox) >= self._capacity:
            return "full"
        if peer.alive:
            peer.send(0, frames)
        else:
            # Nobody knows yet: it goes nowhere, but it takes room.
            peer.sent[0] += 1
        return "sent"

    def kick(self) -> None:
        """Nothing is ever left behind here."""

    def arrived(self, identity: bytes, frames: Frames) -> None:
        if not self.closed:
            self._take(identity, frames)

    def lost(self, connection: Connection) -> None:
        if self.peers.get(connection.identity) is connection:
            del self.peers[connection.identity]


class Dealer:
    """A dialling end. ``told`` is called when something lies in ``inbox``, ``losses`` counts ended connections."""

    def __init__(self, net: "Network", port: str, told: Callable[[], None], identity: bytes = b"") -> None:
        self.net, self.port, self.identity = net, port, identity
        self.inbox: deque[Frames] = deque()
        self.losses = 0
        self.slow = 1.0  #: by how much this one's messages take longer than others'
        self.closed = False
        self.connection: Connection | None = None
        self._told = told
        self._outbox: deque[Frames] = deque()
        net.dial(self)

    def send(self, frames: Frames) -> None:
        connection = self.connection
        if connection is None:
            self._outbox.append(frames)
        elif connection.alive:
            connection.send(1, frames)

    def arrived(self, connection: Connection, frames: Frames) -> None:
        if not self.closed:
            self.inbox.append(frames)
            self._told()

    def connected(self, connection: Connection) -> None:
        self.connection = connection
        while self._outbox:
            connection.send(1, self._outbox.popleft())

    def lost(self, connection: Connection) -> None:
        if self.connection is connection:
            self.connection = None
            self.losses += 1
            if not self.closed:
                self.net.dial(self)

    def close(self, *, unnoticed: bool = False) -> None:
        self.closed = True
        self._outbox.clear()
        if self.connection is not None:
            self.connection.cut(unnoticed=unnoticed)


class Network:
    """All connections. ``latency``: what a message usually takes, in seconds."""

    def __init__(self, clock: Clock, random: Random, latency: float, spikes: float) -> None:
        self.clock, self.random = clock, random
        self._latency, self._spikes = latency, spikes
        self._routers: dict[str, Router] = {}
        self._waiting: list[Dealer] = []

    def delay(self, end: Dealer) -> float:
        draw = self.random.random
        delay = self._latency * (0.5 + draw()) * end.slow
        return delay * 100 if self._spikes and draw() < self._spikes else delay

    def calm(self) -> None:
        """No more spikes."""
        self._spikes = 0.0

    def notice(self) -> float:
        return 0.0001 + 0.02 * self.random.random() ** 3

    def bind(self, port: str, router: Router) -> None:
        self._routers[port] = router
        waiting, self._waiting = self._waiting, []
        for dealer in waiting:
            self.dial(dealer)

    def unbind(self, port: str) -> None:
        """The process is gone."""
        router = self._routers.pop(port, None)
        if router is not None:
            router.closed = True
            for connection in list(router.peers.values()):
                connection.cut()

    def dial(self, dealer: Dealer) -> None:
        self.clock.after(0.001 + 0.3 * self.random.random() ** 3, self._connect, dealer)

    def _connect(self, dealer: Dealer) -> None:
        if dealer.closed or dealer.connection is not None:
            return
        router = self._routers.get(dealer.port)
        if router is None:
            self._waiting.append(dealer)
            return
        identity = dealer.identity or b"\0" + self.random.randbytes(4)
        before = router.peers.get(identity)
        if before is not None:
            before.cut()
        connection = router.peers[identity] = Connection(self, router, dealer, identity)
        dealer.connected(connection)
