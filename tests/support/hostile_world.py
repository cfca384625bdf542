"""The real control process's server in virtual time, among peers of which some are hostile: no sockets, no threads,
so that a seed gives the same run every time and an exception comes out where it was raised.

An honest worker serves replica 0 and an honest client asks for completions; what ``hostile`` draws is given to the
server between their messages, as from strangers, from clients that have joined, and from a worker that has a place.
"""

from __future__ import annotations

import random
from array import array
from collections import deque
from collections.abc import Callable
from typing import Any

import msgpack
from evenflow.control.client_state import ClientState, Request
from evenflow.control.core.events import Limits
from evenflow.control.core.integrity import check_integrity
from evenflow.control.host import Sent, Take
from evenflow.control.options import ControlOptions
from evenflow.control.server import TICK_S, ControlServer
from evenflow.control.wire import (
    BatchPlan,
    Heartbeat,
    Hello,
    Quit,
    Redial,
    Sampling,
    Start,
    Started,
    decode_to_client,
    decode_to_worker,
    encode,
)
from evenflow.dataplane.batch import ModelInfo
from evenflow.dataplane.executor import Limits as WorkerLimits
from evenflow.dataplane.simulated.blank import BlankRunner
from evenflow.dataplane.simulated.loopback import LoopbackReplica
from hostile import Hostile

VOCAB = 40_000
#: Seconds of virtual time between two messages of the hostile.
PAUSE_S = 0.002


class _Timer:
    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class _Port:
    """What is sent to peers that are there lies in their boxes; no others are there."""

    def __init__(self) -> None:
        self.boxes: dict[bytes, deque[list[bytes]]] = {}

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        box = self.boxes.get(identity)
        if box is None:
            return "gone"
        if len(box) >= 256:
            return "full"
        box.append(frames)
        return "sent"

    def kick(self) -> None:
        """Nothing is ever missed."""


class _Ports:
    events = guard = None

    def __init__(self) -> None:
        self.workers, self.clients = _Port(), _Port()

    def close(self) -> None:
        """There is nothing to close."""


class VirtualHost:
    """``ControlServer``'s surroundings: time passes when it is told to."""

    def __init__(self) -> None:
        self.time = 1000.0
        self.ports = _Ports()
        self._draw = random.Random(1)
        self._timers: list[tuple[float, int, _Timer, Callable[..., object], tuple[Any, ...]]] = []
        self._count = 0
        self.now = self.wall = lambda: self.time

    def draw(self, bits: int) -> int:
        return self._draw.getrandbits(bits)

    def call_at(self, when: float, callback: Callable[..., object], *args: Any) -> _Timer:
        self._count += 1
        timer = _Timer()
        self._timers.append((when, self._count, timer, callback, args))
        return timer

    def call_later(self, delay: float, callback: Callable[..., object], *args: Any) -> _Timer:
        return self.call_at(self.time + delay, callback, *args)

    def call_soon(self, callback: Callable[..., object], *args: Any) -> _Timer:
        return self.call_at(self.time, callback, *args)

    def open(self, options: ControlOptions, from_worker: Take, from_client: Take) -> _Ports:
        self.from_worker, self.from_client = from_worker, from_client
        return self.ports

    def advance(self, seconds: float) -> None:
        self.time += seconds
        while due := sorted(entry for entry in self._timers if entry[0] <= self.time)[:1]:
            self._timers.remove(due[0])
            _, _, timer, callback, args = due[0]
            if not timer.cancelled:
                callback(*args)


class World:
    """``replicas`` beyond the first are for a liar. ``check`` after every so many hostile messages."""

    def __init__(self, seed: int, *, replicas: int = 1, check: int = 50) -> None:
        self.host = VirtualHost()
        limits = Limits(token_budget=64, max_num_seqs=32, max_model_len=600)
        options = ControlOptions("ipc:///w", "ipc:///c", "/links", limits, replicas=replicas, stages=1)
        self.server = ControlServer(options, self.host)
        self.draw = random.Random(seed)
        self.check = check
        self.said = self.served = 0
        self._workers, self._clients = self.host.ports.workers, self.host.ports.clients
        self._next_tick = 0.0
        info = ModelInfo("blank", (0,), VOCAB, 600, 16, 128, 8)
        self._replica = LoopbackReplica([BlankRunner(0, 1, info)], WorkerLimits(max_tokens=64, num_slots=64))
        self._workers.boxes[b"honest"] = deque()
        self.hello = self._replica.hellos()[0]
        self.from_worker(b"honest", self.hello)
        self._state = ClientState("honest")
        self._state.start(self.host.time)
        self._asked: list[tuple[Request, int, int]] = []
        self._connection = -1
        self.strangers = {"worker": Hostile(seed, "from worker", self.facts), "client": Hostile(seed, "from client")}
        self.live()

    def facts(self) -> list[int]:
        """Numbers that the workers' side of the server holds to be true."""
        sites = self.server.supervisor.sites
        return [0, 1, *(site.epoch for site in sites), *(step for site in sites for step, _ in site.inflight)]

    def from_worker(self, identity: bytes, *messages: object) -> None:
        for message in messages:
            self.host.from_worker(identity, [encode(message)])

    # ---- who is honest ---------------------------------------------------------------------------------------

    def live(self, seconds: float = PAUSE_S) -> None:
        """What the honest do in so much time, and what is due by time."""
        self.host.advance(seconds)
        if self.host.time >= self._next_tick:
            self._next_tick = self.host.time + TICK_S
            self.server.tick()
            self.from_worker(b"honest", Heartbeat())
        self._work()
        self._read()

    def _work(self) -> None:
        box = self._workers.boxes[b"honest"]
        while box:
            frames = box.popleft()
            message = decode_to_worker(frames[-1])
            if isinstance(message, Start):
                self._replica.start(message)
                self.from_worker(b"honest", Started(message.epoch))
            elif isinstance(message, BatchPlan):
                self._replica.submit(frames)
            elif isinstance(message, Redial):
                self.from_worker(b"honest", self.hello)
            assert not isinstance(message, Quit), message
        for result in self._replica.run_one():
            self.from_worker(b"honest", result)

    def _read(self) -> None:
        state, now = self._state, self.host.time
        state.on_timer(now)
        name = b"client-%d" % state.connection
        if state.connection != self._connection:
            self._clients.boxes.pop(b"client-%d" % self._connection, None)
            self._connection = state.connection
            self._clients.boxes[name] = deque()
        box = self._clients.boxes[name]
        if len(state.requests) < 4:
            size, count = self.draw.randint(1, 150), self.draw.randint(1, 60)
            prompt = array("I", range(1, size + 1)).tobytes()
            # Without a shared prefix, so that all replicas get some.
            salt = self.draw.randbytes(4)
            asked = state.submit(prompt, name="r", max_tokens=count, sampling=Sampling(), salt=salt)
            self._asked.append((asked, size, count))
        for message in state.outbox:
            self.host.from_client(name, [encode(message)])
        state.outbox.clear()
        while box and state.connection == self._connection:
            state.receive(decode_to_client(box.popleft()[0]), now)
        state.touched.clear()
        for asked, size, count in [entry for entry in self._asked if entry[0].finish is not None]:
            self._asked.remove((asked, size, count))
            self._judge(asked, size, count)

    def _judge(self, asked: Request, size: int, count: int) -> None:
        assert asked.finish is not None and asked.finish.reason == "length", asked.finish
        assert asked.received.tolist() == [1 + (size + n) % (VOCAB - 1) for n in range(count)]
        self.served += 1

    # ---- who is not ------------------------------------------------------------------------------------------

    def nonsense(self, side: str) -> None:
        """One message of a stranger, or of a client that has joined and may read what it is answered."""
        hostile = self.strangers[side]
        port = self._workers if side == "worker" else self._clients
        name = f"{side} {hostile.draw.randrange(4)}".encode()
        if hostile.draw.random() < 0.02:
            # It comes, reads or goes.
            if name in port.boxes and hostile.draw.random() < 0.5:
                del port.boxes[name]
            else:
                port.boxes[name] = deque()
        frames = hostile.message()
        (self.host.from_worker if side == "worker" else self.host.from_client)(name, frames)
        self._count()

    def _count(self) -> None:
        self.said += 1
        if self.said % self.check == 0:
            self.assert_whole()

    def assert_whole(self) -> None:
        if self.server.engine is not None:
            check_integrity(self.server.engine)

    def settle(self) -> None:
        """The hostile are gone: in the end nothing is left of them."""
        for port in (self._workers, self._clients):
            for name in [name for name in port.boxes if name.startswith((b"worker", b"client ", b"liar"))]:
                del port.boxes[name]
        for _ in range(600):
            self.live(0.02)
        self.assert_whole()
        sessions = self.server.sessions.by_owner
        assert [session.name for session in sessions.values()] == ["honest"]
        engine = self.server.engine
        assert engine is not None and set(engine.requests) <= set(sessions)


class Liar:
    """A worker with a place in replica 1, whose results are not those of the plans that it is given."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self._hostile = Hostile(seed, "from worker", world.facts)
        self._box: deque[list[bytes]] = deque()
        self._number = self._away = 0
        self.lies = 0
        self._arrive()

    def _arrive(self) -> None:
        """As a process that was started again would."""
        self._number += 1
        self.name = b"liar %d" % self._number
        self._box = self.world.host.ports.workers.boxes[self.name] = deque()
        hello: Hello = self.world.hello
        fields: dict[str, Any] = {name: getattr(hello, name) for name in hello.__struct_fields__}
        self.world.from_worker(self.name, Hello(**{**fields, "replica": 1, "pid": 9000 + self._number}))

    def live(self) -> None:
        draw = self._hostile.draw
        self._away -= 1
        if not self._away:
            self._arrive()
        while self._box and self._away < 0:
            message = decode_to_worker(self._box.popleft()[-1])
            if isinstance(message, Start):
                self.world.from_worker(self.name, Started(message.epoch))
            elif isinstance(message, BatchPlan):
                self._lie(message)
            elif isinstance(message, Redial | Quit):
                self._leave()
        if draw.random() < 0.02:
            self.world.host.from_worker(self.name, self._hostile.message())
        if draw.random() < 0.002:
            self._leave()

    def _leave(self) -> None:
        """It is gone, and comes back a little later."""
        self.world.host.ports.workers.boxes.pop(self.name, None)
        self._away = 20

    def _lie(self, plan: BatchPlan) -> None:
        """A result of this plan, at times but for one or two of its fields."""
        draw, hostile = self._hostile.draw, self._hostile
        fields: list[Any] = [18, plan.epoch, plan.step, plan.lane, 1, 2, 3, 4, 0, bytes(4 * 64), b"", None, []]
        golden = [6, 1, [b"\0\0\0\0", b"\1\0\0\0"], 2]
        for _ in range(draw.choice((0, 0, 0, 0, 0, 0, 1, 2))):
            place = draw.randrange(2, 13)
            if place == 12:
                fields[12] = [[draw.randrange(70), *map(hostile.vary, (5, *golden[2], b"", b""))]] * draw.randrange(3)
            else:
                fields[place] = hostile.vary(7 if fields[place] is None else fields[place])
        self.lies += 1
        self.world.host.from_worker(self.name, [msgpack.packb(fields)])
        self.world._count()
