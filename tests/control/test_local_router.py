"""The clients' socket on this machine, with ZeroMQ itself on the other side."""

import asyncio
import contextlib
import os
import socket
import stat
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import uvloop
import zmq
from evenflow.control import local_router
from evenflow.control.host import Sent
from evenflow.control.local_router import LocalRouter
from evenflow.control.wire.sockets import EndpointError, WireContext, close_context, dial_dealer, new_context
from evenflow.control.wire.zmtp import GREETING, framed
from zmtp_peer import SHAKEN, ready


class Beyond:
    """Another port."""

    def __init__(self) -> None:
        self.sent: list[tuple[bytes, list[bytes]]] = []
        self.kicked = 0

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        self.sent.append((identity, frames))
        return "sent"

    def kick(self) -> None:
        self.kicked += 1


class World:
    """A router that keeps what it is given, and answers it if ``echo``."""

    def __init__(self, folder: Path, context: WireContext, beyond: Beyond | None = None) -> None:
        self.endpoint = f"ipc://{folder}/clients"
        self.context = context
        self.echo = False
        self.taken: list[tuple[bytes, list[bytes]]] = []
        self._kept = contextlib.ExitStack()
        self.router = LocalRouter(asyncio.get_running_loop(), self.endpoint, self._take, beyond)

    def _take(self, identity: bytes, frames: list[bytes]) -> None:
        self.taken.append((identity, frames))
        if self.echo:
            assert self.router.send(identity, frames) == "sent"

    def dial(self, **options: int) -> zmq.Socket[bytes]:
        return self.keep(dial_dealer(self.context, self.endpoint, **options))

    def keep(self, made: zmq.Socket[bytes]) -> zmq.Socket[bytes]:
        """Until the end."""
        self._kept.callback(made.close, 0)
        return made

    def plain(self, said: bytes = b"") -> socket.socket:
        """A connection without ZeroMQ."""
        made = self._kept.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        made.connect(self.endpoint.removeprefix("ipc://"))
        made.sendall(said)
        made.setblocking(False)
        return made

    def close(self) -> None:
        self.router.close()
        self._kept.close()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(60):
            while not condition():
                await asyncio.sleep(0.005)

    async def named(self, dealer: zmq.Socket[bytes]) -> bytes:
        """The name of a peer, which says something for that."""
        before = len(self.taken)
        dealer.send(b"who am I?")
        await self.until(lambda: len(self.taken) > before)
        return self.taken[-1][0]

    async def ended(self, made: socket.socket) -> bytes:
        """What a plain connection was sent until it was ended."""
        said = b""
        async with asyncio.timeout(60):
            while True:
                try:
                    data = made.recv(1000)
                except BlockingIOError:
                    await asyncio.sleep(0.005)
                    continue
                except ConnectionResetError:
                    return said
                if not data:
                    return said
                said += data


@pytest.fixture
def context() -> Iterator[WireContext]:
    made = new_context()
    yield made
    close_context(made)


def drive(
    folder: Path,
    context: WireContext,
    work: Callable[[World], Awaitable[None]],
    beyond: Beyond | None = None,
    uv: bool = True,
) -> None:
    async def main() -> None:
        world = World(folder, context, beyond)
        try:
            await work(world)
        finally:
            world.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop if uv else None) as runner:
        runner.run(main())


async def received(dealer: zmq.Socket[bytes]) -> list[bytes]:
    async with asyncio.timeout(60):
        while not dealer.poll(0):
            await asyncio.sleep(0.002)
    return dealer.recv_multipart()


@pytest.mark.parametrize("uv", [True, False])
def test_zeromq_talks_to_it(tmp_path: Path, context: WireContext, uv: bool) -> None:
    sizes = [0, 1, 100, 254, 255, 256, 257, 8191, 8192, 70_000, 3_000_000]

    async def work(world: World) -> None:
        world.echo = True
        dealers = [world.dial() for _ in range(3)]
        for number, dealer in enumerate(dealers):
            for size in sizes:
                dealer.send(bytes((number,)) * size)
        for number, dealer in enumerate(dealers):
            for size in sizes:
                assert await received(dealer) == [bytes((number,)) * size]
        assert len({identity for identity, _ in world.taken}) == 3

    drive(tmp_path, context, work, uv=uv)


def test_messages_of_several_frames(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        dealer = world.dial()
        identity = await world.named(dealer)
        dealer.send_multipart([b"a", b"b" * 300, b"c"])
        asking = world.keep(context.socket(zmq.REQ))
        asking.connect(world.endpoint)
        asking.send(b"an envelope comes before this")
        await world.until(lambda: len(world.taken) == 3)
        assert [frames for _, frames in world.taken[1:]] == [[b"", b""]] * 2
        assert world.router.send(identity, [b"", b"x" * 300, b"y"]) == "sent"
        assert await received(dealer) == [b"", b"x" * 300, b"y"]

    drive(tmp_path, context, work)


def test_a_peer_that_does_not_read_has_a_bounded_queue(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        other, deaf = world.dial(), world.dial(receive_hwm=2)
        identity = await world.named(deaf)
        told = await world.named(other)
        sent = 0
        for number in range(100_000):
            verdict = world.router.send(identity, [number.to_bytes(4) * 500])
            if verdict == "full":
                break
            assert verdict == "sent"
            sent += 1
            assert len(world.router._peers[identity].waiting) <= world.router.hwm
        assert sent < 20_000 and len(world.router._peers[identity].waiting) == world.router.hwm
        assert world.router.send(told, [b"not held up"]) == "sent"
        assert await received(other) == [b"not held up"]
        assert world.router.send(identity, [b"x"]) == "full"
        for number in range(sent):
            assert await received(deaf) == [number.to_bytes(4) * 500]
        await world.until(lambda: not world.router._peers[identity].waiting)
        assert world.router.send(identity, [b"there is room again"]) == "sent"
        assert await received(deaf) == [b"there is room again"]

    drive(tmp_path, context, work)


def test_a_peer_that_has_left_is_gone(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        leaving, deaf, staying = world.dial(), world.plain(SHAKEN + framed(b"x")), world.dial()
        await world.until(lambda: world.taken)
        full = world.taken[0][0]
        gone, there = await world.named(leaving), await world.named(staying)
        while world.router.send(full, [bytes(1000)]) == "sent":
            pass
        leaving.close(0)
        deaf.close()
        await world.until(lambda: len(world.router._peers) == 1)
        assert [world.router.send(name, [b"x"]) for name in (gone, full, b"never here")] == ["gone"] * 3
        assert world.router.send(there, [b"x"]) == "sent"
        assert await received(staying) == [b"x"]

    drive(tmp_path, context, work)


def test_a_peer_that_leaves_between_two_looks_is_gone_when_it_is_told(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        leaving = world.plain(SHAKEN + framed(b"x"))
        await world.until(lambda: world.taken)
        leaving.close()
        # The loop has not had its turn.
        assert world.router.send(world.taken[0][0], [b"x"]) == "gone"
        assert not world.router._peers

    drive(tmp_path, context, work)


def test_strangers_are_disconnected_and_nobody_else_notices(
    tmp_path: Path, context: WireContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(world: World) -> None:
        world.echo = True
        dealer = world.dial()
        await world.named(dealer)
        assert await received(dealer) == [b"who am I?"]
        for said in (b"GET / HTTP/1.1\r\n\r\n", GREETING + ready(b"PUB"), SHAKEN + b"\x02" + b"\xff" * 8):
            assert (await world.ended(world.plain(said))).startswith(GREETING[:10])
        silent, slow = world.plain(), world.plain(GREETING)
        await world.until(lambda: len(world.router._strangers) == 2)
        world.router.kick()
        assert len(world.router._peers) == 3
        monkeypatch.setattr(local_router, "HANDSHAKE_S", 0.0)
        world.router.kick()
        assert await world.ended(silent) == GREETING and (await world.ended(slow)).startswith(GREETING)
        dealer.send(b"still here")
        assert await received(dealer) == [b"still here"]
        assert len(world.router._peers) == 1 and not world.router._strangers

    drive(tmp_path, context, work)


def test_heartbeats_of_zeromq_are_answered(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        dealer = world.keep(context.socket(zmq.DEALER))
        dealer.setsockopt(zmq.HEARTBEAT_IVL, 10)
        dealer.setsockopt(zmq.HEARTBEAT_TIMEOUT, 20_000)
        monitor = world.keep(dealer.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        dealer.connect(world.endpoint)
        identity = await world.named(dealer)
        answered = 0
        write = world.router._write

        def count(peer: object, data: bytes) -> bool:
            nonlocal answered
            answered += b"PONG" in data
            return write(peer, data)

        world.router._write = count
        await world.until(lambda: answered > 5)
        assert world.router.send(identity, [b"x"]) == "sent" and await received(dealer) == [b"x"]
        assert not monitor.poll(0)
        dealer.disable_monitor()

    drive(tmp_path, context, work)


def test_who_sends_much_does_not_keep_others_from_their_turn(tmp_path: Path, context: WireContext) -> None:
    async def work(world: World) -> None:
        many = world.plain(SHAKEN)
        few = world.plain(SHAKEN)
        await world.until(lambda: len(world.router._peers) == 2 and not world.router._strangers)
        # Both are there before the loop looks again.
        many.sendall(framed(b"many") * 5000)
        few.sendall(framed(b"few"))
        turns = 0

        def note() -> None:
            nonlocal turns
            turns += 1
            if len(world.taken) < 5001:
                asyncio.get_running_loop().call_soon(note)

        note()
        await world.until(lambda: len(world.taken) == 5001)
        at = [frames for _, frames in world.taken].index([b"few"])
        assert at <= 2 * local_router.BURST
        assert turns >= 5001 // local_router.BURST

    drive(tmp_path, context, work)


def test_names_that_are_not_its_own_are_for_the_other_port(tmp_path: Path, context: WireContext) -> None:
    beyond = Beyond()

    async def work(world: World) -> None:
        dealer = world.dial(identity=b"chosen")
        assert await world.named(dealer) != b"chosen"
        assert world.router.send(b"chosen", [b"x"]) == "sent"
        world.router.kick()
        assert beyond.sent == [(b"chosen", [b"x"])] and beyond.kicked == 1

    drive(tmp_path, context, work, beyond)


def test_connections_are_bounded(tmp_path: Path, context: WireContext, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local_router, "MAX_CONNECTIONS", 2)

    async def work(world: World) -> None:
        world.echo = True
        first, second = world.dial(), world.dial()
        for dealer in (first, second):
            await world.named(dealer)
            assert await received(dealer) == [b"who am I?"]
        assert await world.ended(world.plain()) == b""
        first.close(0)
        await world.until(lambda: len(world.router._peers) == 1)
        third = world.dial()
        await world.named(third)

    drive(tmp_path, context, work)


def test_no_descriptor_for_a_connection_is_no_end(
    tmp_path: Path, context: WireContext, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_router, "_PAUSE_S", 0.01)

    async def work(world: World) -> None:
        listener, tries = world.router._listener, 0

        class Exhausted:
            fileno, close = listener.fileno, listener.close

            def accept(self) -> tuple[socket.socket, object]:
                nonlocal tries
                tries += 1
                if tries < 4:
                    raise OSError(24, "Too many open files")
                return listener.accept()

        world.router._listener = Exhausted()
        dealer = world.dial()
        await world.named(dealer)
        assert tries >= 4

    drive(tmp_path, context, work)


def test_the_endpoint(tmp_path: Path, context: WireContext) -> None:
    path = tmp_path / "clients"

    async def work(world: World) -> None:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        with pytest.raises(EndpointError, match="another process listens there"):
            World(tmp_path, context)

    drive(tmp_path, context, work)
    assert not path.exists()
    # What a killed process has left.
    left = socket.socket(socket.AF_UNIX)
    left.bind(os.fspath(path))
    left.close()
    drive(tmp_path, context, work)
    path.write_text("something else")
    with pytest.raises(EndpointError, match="no socket"):
        drive(tmp_path, context, work)
    assert path.read_text() == "something else"
