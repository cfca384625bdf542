"""Peers of one socket each of a running system that send it what ``hostile`` draws, and read what they are answered.

An attacker takes turns: each sends a few messages without waiting, and counts them. What a socket's process must
count as bad is worked out here from the frames (``bad``), to be compared with what it says.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import random
import select
import socket
import struct
import subprocess
import sys
import threading
from collections import Counter, deque
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from evenflow.control.client import Client
from evenflow.control.wire import (
    PROTOCOL_VERSION,
    BatchPlan,
    ClientHello,
    Hello,
    Quit,
    Register,
    Result,
    Start,
    Started,
    Submit,
    Tick,
    Welcome,
    WireError,
    decode_from_client,
    decode_from_worker,
    decode_to_worker,
    encode,
)
from evenflow.control.wire.client import End
from evenflow.control.wire.keys import DialKeys
from evenflow.control.wire.sockets import WireContext, bind_router
from evenflow.dataplane.simulated.shadow import shadow_tokens
from golden import u16, u32, u64
from hostile import Direction, Hostile
from live_server import wait_for

#: Messages in a turn.
TURN = 20


class Dealer:
    """Several connections to one ROUTER of the control process. They stay until the end: what a connection that is
    closed had sent may be lost, and could not be counted."""

    def __init__(
        self,
        context: WireContext,
        name: str,
        endpoint: str,
        direction: Direction,
        seed: int,
        keys: DialKeys | None = None,
        sockets: int = 3,
    ) -> None:
        self.name = name
        self.hostile = Hostile(seed, direction)
        self.sent = self.bad = self.answers = 0
        self._context, self._endpoint, self._keys = context, endpoint, keys
        self._sockets = [self._dial() for _ in range(sockets)]
        self._waiting: list[bytes] | None = None

    def turn(self) -> None:
        draw = self.hostile.draw
        for _ in range(TURN):
            frames = self.hostile.message() if self._waiting is None else self._waiting
            place = draw.randrange(len(self._sockets))
            try:
                self._sockets[place].send_multipart(frames, zmq.NOBLOCK)
            except zmq.Again:
                # The other end does not read as fast: later.
                self._waiting = frames
                break
            self._waiting = None
            self.sent += 1
            self.bad += self._is_bad(frames)
        self.read()

    def read(self) -> None:
        for dealer in self._sockets:
            with contextlib.suppress(zmq.Again):
                while True:
                    dealer.recv_multipart(zmq.NOBLOCK)
                    self.answers += 1

    def close(self) -> None:
        for dealer in self._sockets:
            dealer.close(0)

    def _dial(self) -> zmq.Socket[bytes]:
        dealer = self._context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.SNDHWM, 1000)
        if self._keys is not None:
            dealer.setsockopt(zmq.CURVE_SERVERKEY, self._keys.server)
            dealer.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.public)
            dealer.setsockopt(zmq.CURVE_SECRETKEY, self._keys.secret)
        dealer.connect(self._endpoint)
        return dealer

    def _is_bad(self, frames: list[bytes]) -> bool:
        """Whether ``bad_frames_total`` counts it."""
        decode = decode_from_client if self.hostile.direction == "from client" else decode_from_worker
        try:
            message = decode(frames[0] if len(frames) == 1 else b"")
        except WireError:
            return True
        return isinstance(message, ClientHello) and message.version != PROTOCOL_VERSION


def _zmtp(mechanism: bytes = b"NULL", kind: bytes = b"DEALER") -> bytes:
    """What a ZeroMQ peer says before its first message, if it does not wait for an answer."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + mechanism.ljust(20, b"\0") + bytes(32)
    ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", len(kind)) + kind
    return greeting + b"\x04" + bytes([len(ready)]) + ready


class Raw:
    """Bytes on a connection that ought to speak ZeroMQ's protocol (or TLS, or whatever), at a path or a port."""

    def __init__(self, name: str, address: str | tuple[str, int], direction: Direction, seed: int) -> None:
        self.name = name
        self.sent = self.bad = 0
        self._address = address
        self._hostile = Hostile(seed + 1, direction)
        self._open: deque[socket.socket] = deque()

    def turn(self) -> None:
        draw = self._hostile.draw
        made = socket.socket(socket.AF_UNIX if isinstance(self._address, str) else socket.AF_INET)
        made.setblocking(False)
        try:
            made.connect(self._address)
        except BlockingIOError:
            if isinstance(self._address, str):
                # As many connections as the system keeps wait to be accepted.
                made.close()
                return
            select.select([], [made], [], 30.0)
        self._open.append(made)
        for part in self._talk(draw):
            with contextlib.suppress(OSError):
                made.send(part)
                self.sent += 1
        while len(self._open) > 12:
            self._open.popleft().close()

    def read(self) -> None:
        """Nothing that is answered matters."""

    def close(self) -> None:
        for made in self._open:
            made.close()

    def _talk(self, draw: random.Random) -> list[bytes]:
        how = draw.randrange(8)
        if how == 0:
            return [draw.randbytes(draw.choice((1, 9, 64, 1000, 20_000)))]
        if how == 1:
            return [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", draw.randbytes(100)]
        if how == 2:
            return [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + draw.randbytes(500)]
        if how == 3:
            return [_zmtp()[: draw.randrange(1, 64)], draw.randbytes(50)]
        if how == 4:
            return [_zmtp(draw.choice((b"CURVE", b"PLAIN", b"X"))), b"\x04\xc8\x05HELLO" + draw.randbytes(194)]
        if how == 5:
            # A frame of 2 GB, and one larger than all memory: announced only.
            claim = draw.choice((1 << 31, (16 << 20) + 1, (1 << 63) - 1, (1 << 64) - 1))
            return [_zmtp(), b"\x02" + struct.pack(">Q", claim) + draw.randbytes(50)]
        if how == 6:
            # Messages whose last frame never comes.
            return [_zmtp(), *(b"\x01\x0a" + draw.randbytes(10) for _ in range(30))]
        kind = draw.choice((b"DEALER", b"REQ", b"PUB", b"ROUTER", b"STREAM"))
        frames = [frame for _ in range(6) for frame in self._hostile.message()]
        return [_zmtp(kind=kind), *(b"\x02" + struct.pack(">Q", len(frame)) + frame for frame in frames)]


class Subscriber:
    """Says all kinds of things to the ``events`` socket, which has only its subscription to hear."""

    def __init__(self, context: WireContext, name: str, endpoint: str, seed: int) -> None:
        self.name = name
        self.sent = self.bad = 0
        self._hostile = Hostile(seed, "record")
        self._endpoint = endpoint
        self._context = context
        self._socket = self._dial()

    def _dial(self) -> zmq.Socket[bytes]:
        made = self._context.socket(zmq.XSUB)
        made.setsockopt(zmq.SNDHWM, 50)
        made.connect(self._endpoint)
        return made

    def turn(self) -> None:
        draw = self._hostile.draw
        for _ in range(TURN // 4):
            frames = self._hostile.message()
            if draw.random() < 0.3:
                topic = draw.choice((b"", b"x", draw.randbytes(8), draw.randbytes(1020)))
                frames = [draw.choice((b"\x00", b"\x01")) + topic]
            with contextlib.suppress(zmq.Again):
                self._socket.send_multipart(frames, zmq.NOBLOCK)
                self.sent += 1
        if draw.random() < 0.01:
            self._socket.close(0)
            self._socket = self._dial()
        self.read()

    def read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._socket.recv_multipart(zmq.NOBLOCK)

    def close(self) -> None:
        self._socket.close(0)


BODIES: tuple[dict[str, Any], ...] = (
    {"prompt": "x", "max_tokens": 1},
    {"prompt": [5, 6], "max_tokens": 1, "stop": ["a"], "logit_bias": {"5": 1}, "seed": 1, "temperature": 0.5},
    {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "top_p": 0.9, "logprobs": True},
    {"prompt": "x", "max_tokens": 1, "stream": True, "stream_options": {"include_usage": True}, "n": 2},
)
PATHS = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/v1/models", "/metrics", "/../x")


class Caller(threading.Thread):
    """Asks the gateway for nonsense, in ways that are no HTTP or no JSON or no request. ``wrong`` has what it should
    not have answered."""

    def __init__(self, name: str, url: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.name = name
        self.sent = self.bad = 0
        self.statuses: Counter[int] = Counter()
        self.wrong: list[str] = []
        host, _, port = url.removeprefix("http://").rpartition(":")
        self._address = host, int(port)
        self._hostile = Hostile(seed, "from client")
        self._end = threading.Event()
        self.start()

    def turn(self) -> None:
        """It has a thread of its own, as answers are waited for."""

    def read(self) -> None:
        """Likewise."""

    def close(self) -> None:
        self._end.set()
        self.join(60.0)

    def run(self) -> None:
        while not self._end.is_set():
            try:
                if self._hostile.draw.random() < 0.3:
                    self._bytes()
                else:
                    self._body()
            except (OSError, http.client.HTTPException) as error:
                self.wrong.append(f"{type(error).__name__}: {error}")
            self.sent += 1

    def _bytes(self) -> None:
        draw = self._hostile.draw
        length = draw.choice(("-1", "99999999999999999999", "0x10", "5, 6", "1e3"))
        said = draw.choice(
            (
                draw.randbytes(draw.choice((1, 100, 5000))),
                b"POST /v1/completions HTTP/1.1\r\ncontent-length: " + length.encode() + b"\r\n\r\n{}",
                b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}\r\n",
                b"GET / HTTP/9.9\r\n\r\n",
                b"GET /%00%ff?\xff\xfe HTTP/1.1\r\nhost: \xff\r\n\r\n",
                b"X" * 9000,
                b"POST /v1/completions HTTP/1.1\r\n" + b"a: b\r\n" * 300 + b"\r\n",
                *self._hostile.message(),
            )
        )
        with socket.create_connection(self._address, 30.0) as made, contextlib.suppress(OSError):
            made.sendall(said)
            made.settimeout(0.05)
            made.recv(1000)

    def _body(self) -> None:
        draw = self._hostile.draw
        body: dict[str, Any] = dict(draw.choice(BODIES))
        field = draw.choice([*body, "n", "logprobs", "echo", "user", "tokens", "min_tokens", "ignore_eos"])
        # Not so many tokens that the answer is waited for: that is another test.
        body[field] = _plain(self._hostile.vary(body.get(field)) if draw.random() < 0.5 else self._hostile.any())
        if isinstance(body.get("max_tokens"), int):
            body["max_tokens"] = min(body["max_tokens"], 20)
        data = json.dumps(body).encode()
        how = draw.random()
        if how < 0.1:
            data = b"[" * draw.choice((10, 2000, 200_000))
        elif how < 0.2:
            data = data[: draw.randrange(len(data))]
        elif how < 0.25:
            data = b'{"prompt": "x", "max_tokens": 1' + b"0" * 10_000 + b"}"
        elif how < 0.3:
            data = b'{"prompt": "\\ud800\\udfff\\ud800", "max_tokens": 1}'
        connection = http.client.HTTPConnection(*self._address, timeout=60.0)
        try:
            method = draw.choice(("POST", "POST", "POST", "PUT", "GET", "BREW"))
            connection.request(method, draw.choice(PATHS[:2] * 4 + PATHS), data, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read()
            self.statuses[answer.status] += 1
            if answer.status >= 500 and answer.status != 503:
                self.wrong.append(f"status {answer.status} to {data[:300]!r}: {text[:200]!r}")
        finally:
            connection.close()


def _plain(value: Any) -> Any:
    """What JSON can say."""
    if isinstance(value, bytes):
        return value.decode("latin-1")
    if isinstance(value, list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


class Master:
    """A hostile control process of one scripted worker. ``honest`` asks it for a token."""

    def __init__(self, context: WireContext, name: str, folder: Path, seed: int) -> None:
        self.name = name
        self.sent = self.bad = 0
        self._hostile = Hostile(seed, "to worker", lambda: (self._epoch, 0, 1, 2, 3))
        self._epoch = 1
        self._waiting: list[bytes] | None = None
        endpoint = f"ipc://{folder}/master"
        self._router = bind_router(context, endpoint)
        command = [sys.executable, "-P", "-m", "evenflow.dataplane.simulated", "--connect", endpoint]
        self.log = folder / "master.log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen([*command, "--num-blocks", "64"], stdout=log, stderr=log)
        self._peer = b""
        try:
            self._find(Hello)
            self.honest()
        except BaseException:
            self.close()
            raise

    def turn(self) -> None:
        for _ in range(TURN // 2):
            frames = self._hostile.message() if self._waiting is None else self._waiting
            if self._waiting is None and self._ends(frames):
                continue
            try:
                self._router.send_multipart([self._peer, *frames], zmq.NOBLOCK)
            except zmq.Again:
                self._waiting = frames
                break
            self._waiting = None
            self.sent += 1
        self.read()

    def read(self) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                self._router.recv_multipart(zmq.NOBLOCK)

    def honest(self) -> None:
        """An epoch in which it is asked for the first token of a prompt."""
        prompt, self._epoch = [21, 22, 23], self._epoch + 1
        start = Start(self._epoch, 1, 64, 16, 8, 64, 512, "")
        register = Register(0, 1, 1, u32(*prompt), 3, 0, u32(0), 64)
        plan = BatchPlan(self._epoch, 0, 0, b"", chunk_slots=u16(0), chunk_tokens=u32(3))
        self._router.send_multipart([self._peer, encode(start)])
        self._find(Started, epoch=self._epoch)
        self._router.send_multipart([self._peer, encode(register), encode(plan)])
        result = self._find(Result, epoch=self._epoch)
        assert np.frombuffer(result.ids, "<u4")[0] == shadow_tokens(prompt, 1)[0]

    def close(self) -> None:
        self.process.kill()
        self.process.wait(30.0)
        self._router.close(0)

    def _find(self, kind: type, **fields: Any) -> Any:
        def found() -> Any:
            assert self.process.poll() is None, self.log.read_text()[-3000:]
            while self._router.poll(10):
                self._peer, *frames = self._router.recv_multipart()
                message = decode_from_worker(frames[0])
                if isinstance(message, kind) and all(getattr(message, k) == v for k, v in fields.items()):
                    return message
            return None

        return wait_for(found, 120.0, f"{kind.__name__} of the worker of a hostile control process")

    @staticmethod
    def _ends(frames: list[bytes]) -> bool:
        """A worker obeys whom it dialled: it would be right to end."""
        try:
            return any(isinstance(decode_to_worker(frame), Quit) for frame in frames)
        except WireError:
            return False


class Host:
    """A hostile server of one Python client. ``honest`` serves it a request."""

    def __init__(self, context: WireContext, name: str, folder: Path, seed: int) -> None:
        self.name = name
        self.sent = self.bad = 0
        self._hostile = Hostile(seed, "to client", lambda: (0, 1, 2, 3, 4, 5, 6, 7))
        self._router = bind_router(context, f"ipc://{folder}/host")
        self._peer = b""
        self._client = Client(f"ipc://{folder}/host")
        self._client.__enter__()
        wait_for(lambda: self.read() or self._peer, why="the client's hello")
        self.honest()

    def turn(self) -> None:
        for _ in range(TURN // 2):
            try:
                self._router.send_multipart([self._peer, *self._hostile.message()], zmq.NOBLOCK)
                self.sent += 1
            except zmq.ZMQError:
                # It has left this connection for another.
                break
        self.read()

    def read(self, serve: bool = False) -> None:
        with contextlib.suppress(zmq.Again):
            while True:
                peer, *frames = self._router.recv_multipart(zmq.NOBLOCK)
                message = decode_from_client(frames[0])
                if isinstance(message, ClientHello):
                    self._peer = peer
                    welcome = Welcome(PROTOCOL_VERSION, 7, "m", True, 4096, 50_000, 16, 4096, 8, 64)
                    self._send(peer, encode(welcome))
                elif serve and isinstance(message, Submit):
                    ends = [End(message.key, 3, "length", 2)]
                    ids, key = u32(41, 42), u64(message.key)
                    self._send(peer, encode(Tick(0, 0, b"\x08", False, ids[:4], u16(3), key)))
                    self._send(peer, encode(Tick(1, 1, b"\x08", False, ids[4:], ends=ends)))

    def honest(self) -> None:
        """Of whatever it was told before, a fresh connection and a request remain."""
        # A gap in the ticks makes it dial again, whatever it believes of this one.
        self._send(self._peer, encode(Tick((1 << 63) - 1, 0, b"", False, b"")))
        got: list[list[int]] = []

        def ask() -> None:
            got.append([token for chunk in self._client.submit([1, 2], max_tokens=2) for token in chunk.ids])

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        wait_for(lambda: self.read(serve=True) or got, 120.0, "an answer to the client of a hostile server")
        assert got == [[41, 42]]

    def close(self) -> None:
        self._client.__exit__(None, None, None)
        self._router.close(0)

    def _send(self, peer: bytes, frame: bytes) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._router.send_multipart([peer, frame], zmq.NOBLOCK)
