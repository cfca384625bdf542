"""The real control process and its clients over real sockets: those that do not read, vanish, idle, or ask for more
than they may (cases ZMQ-3 and SEC-1)."""

import asyncio
from array import array
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgpack
import pytest
import structlog
import zmq
import zmq.asyncio
from evenflow.control import merging, server, sessions
from evenflow.control.client import AsyncClient
from evenflow.control.client_state import ClientState
from evenflow.control.wire import (
    PROTOCOL_VERSION,
    ClientHello,
    Merged,
    Refused,
    Sampling,
    Status,
    StatusReply,
    Submit,
    Subscribe,
    Welcome,
    decode_to_client,
    encode,
)
from evenflow.control.wire.sockets import close_context, new_context
from loop_server import LoopServer, expected


class Raw:
    """A client of nothing but a socket, which reads when it is told to."""

    def __init__(self, context: zmq.Context[Any], endpoint: str, **options: int) -> None:
        self.socket: zmq.Socket[bytes] = context.socket(zmq.DEALER)
        for name, value in {"LINGER": 0, **options}.items():
            self.socket.setsockopt(getattr(zmq, name), value)
        self.socket.connect(endpoint)

    def say(self, *messages: Any) -> None:
        for message in messages:
            self.socket.send(message if isinstance(message, bytes) else encode(message))

    async def read(self, timeout: float = 30.0) -> Any:
        async with asyncio.timeout(timeout):
            while not self.socket.poll(0):
                await asyncio.sleep(0.005)
        return decode_to_client(self.socket.recv())

    async def find(self, kind: type, **fields: Any) -> Any:
        """The next message of a kind."""
        while True:
            message = await self.read()
            if isinstance(message, kind) and all(getattr(message, name) == value for name, value in fields.items()):
                return message


def hello(name: str = "raw", session: int = 0) -> ClientHello:
    return ClientHello(PROTOCOL_VERSION, name, session)


def ask(key: int, prompt: int, count: int, **fields: Any) -> Submit:
    return Submit(key, f"r{key}", array("I", range(1, prompt + 1)).tobytes(), prompt, count, **fields)


Dial = Callable[..., Raw]
Work = Callable[[LoopServer, Dial], Coroutine[Any, Any, None]]


def drive(tmp_path: Path, work: Work, **options: Any) -> None:
    async def main() -> None:
        context = new_context()
        raws: list[Raw] = []
        try:
            async with LoopServer(str(tmp_path), **options) as control:

                def dial(**sizes: int) -> Raw:
                    raws.append(Raw(context, control.endpoint, **sizes))
                    return raws[-1]

                await work(control, dial)
        finally:
            for raw in raws:
                raw.socket.close(0)
            close_context(context)

    asyncio.run(main())


async def output(client: AsyncClient, prompt: int, count: int) -> list[int]:
    stream = await client.submit(range(1, prompt + 1), max_tokens=count, request=f"p{prompt}")
    return [token async for chunk in stream for token in chunk.ids]


SMALL = {"RCVBUF": 2048, "RCVHWM": 8}


def test_zmq_3_a_client_that_never_reads_is_cut_off_and_nobody_else_notices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(merging, "MAX_WAITING_TOKENS", 8_000)

    async def work(control: LoopServer, dial: Dial) -> None:
        control.narrow()
        deaf = dial(**SMALL)
        deaf.say(hello("deaf"), *(ask(key, 10 + key, 15_000) for key in range(8)))
        await control.until(lambda: control.unfinished == 8)
        async with AsyncClient(control.endpoint) as client:
            outputs = await asyncio.gather(*(output(client, 100 + n, 1200) for n in range(4)))
            assert outputs == [expected(100 + n, 1200) for n in range(4)]
            await control.until(lambda: control.unfinished == 0)
            values = (await client.status()).values
        assert values["clients_cut_slow_total"] == 1 and values["clients"] == 1 and values["clients_slow"] == 0
        assert values["client_ticks_merged_total"] > 900 and values["kv_blocks_used"] == 0

    with structlog.testing.capture_logs() as logs:
        drive(tmp_path, work)
    (entry,) = [entry for entry in logs if entry["event"] == "client cut off" and entry["log_level"] == "warning"]
    assert entry["client"] == "deaf" and entry["requests"] == 8 and "at most 8000" in entry["reason"]


def test_zmq_3_a_slow_client_misses_nothing(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        control.narrow()
        slow = dial(**SMALL)
        state = ClientState()
        state.start(0.0)
        requests = [
            state.submit(array("I", range(1, 5 + n)).tobytes(), name="r", max_tokens=1000 + n, sampling=Sampling())
            for n in range(4)
        ]
        merged = 0

        async def talk() -> None:
            nonlocal merged
            slow.say(*state.outbox)
            state.outbox.clear()
            message = await slow.read()
            merged += isinstance(message, Merged)
            state.receive(message, 0.0)

        while not state.connected:
            await talk()
        slow.say(*state.outbox)
        state.outbox.clear()
        await control.until(lambda: control.values()["client_waiting_tokens"] > 500)
        while state.requests:
            await talk()
        assert state.connection == 0 and merged >= 1
        for n, request in enumerate(requests):
            assert request.received.tolist() == expected(4 + n, 1000 + n)
            assert request.finish is not None and request.finish.reason == "length"
        await control.until(lambda: not control.values()["clients_slow"])
        assert control.values()["clients_cut_slow_total"] == 0

    drive(tmp_path, work)


def test_zmq_3_a_client_that_vanishes_is_gone_with_its_requests(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        raw = dial()
        raw.say(hello(), ask(1, 10, 15_000), ask(2, 10, 15_000))
        await control.until(lambda: control.unfinished == 2)
        raw.socket.close(0)
        await control.until(lambda: control.unfinished == 0)
        values = control.values()
        assert values["clients_gone_total"] == 1 and values["clients"] == 0 and values["kv_blocks_used"] == 0

    drive(tmp_path, work, pace=0.005)


def test_zmq_3_many_idle_connections(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_CLIENTS", 60)

    async def work(control: LoopServer, dial: Dial) -> None:
        strangers = [dial() for _ in range(60)]
        idle = [dial() for _ in range(59)]
        for raw in idle:
            raw.say(hello("idle"))
        await control.until(lambda: control.values()["clients"] == 59)
        async with AsyncClient(control.endpoint) as client:
            assert await output(client, 7, 300) == expected(7, 300)
            strangers[0].say(hello("one too many"))
            refused = await strangers[0].find(Refused)
            assert refused.code == "overloaded" and "60 clients" in refused.message and refused.retry_after_ms
            idle.pop().socket.close(0)
            await control.until(lambda: control.values()["clients"] == 59)
            strangers[0].say(hello("now"))
            await strangers[0].find(Welcome)

    drive(tmp_path, work)


def test_a_client_has_so_many_unfinished_requests(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        raw = dial()
        raw.say(hello())
        assert (await raw.find(Welcome)).max_requests == 3
        control.gate.clear()
        raw.say(*(ask(key, 5, 9) for key in range(4)))
        refused = await raw.find(Refused)
        assert (refused.key, refused.code, refused.field) == (3, "overloaded", "key") and "3 unf" in refused.message
        async with AsyncClient(control.endpoint) as other:
            stream = await other.submit([1], max_tokens=1)
            await control.until(lambda: control.unfinished == 4)
            control.gate.set()
            assert await stream.wait()

    drive(tmp_path, work, max_requests=3)


def test_so_many_clients_subscribe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "MAX_SUBSCRIBERS", 1)

    async def work(control: LoopServer, dial: Dial) -> None:
        first, second = dial(), dial()
        first.say(hello(), Subscribe(1))
        await first.find(StatusReply, nonce=0)
        second.say(hello(), Subscribe(1))
        refused = await second.find(Refused)
        assert (refused.code, refused.field) == ("overloaded", "interval_ms") and "Status" in refused.message
        second.say(Status(7))
        await second.find(StatusReply, nonce=7)
        first.say(Subscribe(2), Subscribe(0), Status(9))
        await first.find(StatusReply, nonce=9)
        second.say(Subscribe(1))
        await second.find(StatusReply, nonce=0)

    drive(tmp_path, work)


BAD = [
    ([33, 5, "r", b"1234", 1, 4, [200.0]], 5, "invalid", "sampling.temperature", "<= 100.0"),
    ([33, 5, "r", b"1234", 1, 4, [float("nan")]], 5, "invalid", "sampling.temperature", ">= 0.0"),
    ([33, 5, "r", b"1234", 1, -4], 5, "invalid", "max_tokens", ">= 0"),
    ([33, 5, "r", b"1234", 1, 4, [0.0], [1, 1 << 32]], 5, "invalid", "stop_ids", "index 1"),
    ([33, 5, "r", b"1234", 1, 4, [0.0], [0] * 65], 5, "invalid", "stop_ids", "<= 64"),
    ([33, 5, "r", b"1234", 1, 4, [0.0], [], 0, bytes(65)], 5, "invalid", "salt", "<= 64"),
    ([33, 5, "r" * 300], 5, "invalid", "tokens", "lacks the field tokens"),
    ([33, "five", "r", b"1234", 1], None, "invalid", "key", "int"),
    ([33, -5, "r", b"1234", 1], None, "invalid", "key", ">= 0"),
    ([36, 70_000], None, "invalid", "interval_ms", "<= 60000"),
    ([34], None, "invalid", "key", "lacks"),
    ([32, 1, "x" * 300], None, "invalid", "name", "<= 256"),
    ([99], None, "protocol", "", "99"),
    ({"a": 1}, None, "protocol", "", "array"),
    ("text", None, "protocol", "", "array"),
    ([[]], None, "protocol", "", ""),
    ([], None, "protocol", "", ""),
]


def test_sec_1_what_is_no_message_is_refused_by_field_and_range(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        raw = dial()
        for joined in (False, True):
            if joined:
                raw.say(hello())
            for body, key, code, field, said in BAD:
                raw.say(msgpack.packb(body))
                refused = await raw.find(Refused)
                assert (refused.key, refused.code, refused.field) == (key, code, field), body
                assert said in refused.message, refused.message
            for frame in (b"", b"\xc1", b"\x91" * 20_000, b"\xdd\xff\xff\xff\xff", b"\x80\x04\x95pickle."):
                raw.say(frame)
                assert (await raw.find(Refused)).code == "protocol"
        raw.say(ClientHello(PROTOCOL_VERSION + 1))
        refused = await raw.find(Refused)
        assert refused.field == "version" and str(PROTOCOL_VERSION) in refused.message
        assert control.values()["bad_frames_total"] == 2 * (len(BAD) + 5) + 1, "a hello of another version, too"

    drive(tmp_path, work)


def test_a_bad_request_of_the_python_client_ends_with_the_field_named(tmp_path: Path) -> None:
    async def work(control: LoopServer, _: Dial) -> None:
        async with AsyncClient(control.endpoint) as client:
            stream = await client.submit([1, 2], max_tokens=3, sampling=Sampling(temperature=200.0, seed=1))
            async with asyncio.timeout(30):
                assert not await stream.wait()
            assert stream.finish is not None and stream.finish.code == "invalid"
            assert stream.finish.field == "sampling.temperature" and "<= 100.0" in stream.finish.message

    drive(tmp_path, work)


def test_a_client_that_comes_back_replaces_its_session_at_once(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        before, after, thief = (dial() for _ in range(3))
        before.say(hello())
        welcome = await before.find(Welcome)
        before.say(ask(1, 5, 15_000))
        await control.until(lambda: control.unfinished == 1)
        thief.say(hello("thief", welcome.session ^ 1))
        await thief.find(Welcome)
        assert control.unfinished == 1 and control.values()["clients"] == 2
        after.say(hello("raw", welcome.session))
        again = await after.find(Welcome)
        assert again.session not in (0, welcome.session) and again.instance == welcome.instance
        assert control.unfinished == 0 and control.values()["clients"] == 2

    drive(tmp_path, work, pace=0.005)


def test_draining_waits_for_a_slow_client(tmp_path: Path) -> None:
    async def work(control: LoopServer, dial: Dial) -> None:
        control.narrow()
        raw = dial(**SMALL)
        raw.say(hello(), ask(1, 5, 1000))
        await control.until(lambda: control.unfinished == 1)
        control.control.drain()
        await control.until(lambda: control.unfinished == 0)
        assert control.values()["client_waiting_tokens"] > 0 and not control.control.stopped.is_set()
        merged = await raw.find(Merged)
        assert merged.ends[-1].reason == "length" and merged.ends[-1].output_tokens == 1000
        await control.until(control.control.stopped.is_set)

    drive(tmp_path, work)


def test_a_silent_client_is_cut_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "SILENCE_S", 0.3)

    async def work(control: LoopServer, dial: Dial) -> None:
        raw = dial()
        raw.say(hello("mute"), ask(1, 5, 15_000))
        await control.until(lambda: control.values()["clients_cut_silent_total"] == 1)
        await control.until(lambda: control.unfinished == 0)

    drive(tmp_path, work, pace=0.005)
