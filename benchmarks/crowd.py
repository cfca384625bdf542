"""Many clients of the control process in one process, each with a connection and one running request of its own.

A client submits, checks every token that comes, and submits anew when its request has ended. Answers are of all
lengths around ``ANSWER``, so that they end one by one. To leave the machine to the processes that are measured there
is no ZeroMQ on this side, which would cost more than the process under test: the sockets are the system's own and
speak ZMTP 3.0 themselves, and they are looked at in turns, every ``TURN_S`` seconds. The crowd counts how late its
turns are.

Run by ``flood.py``: python benchmarks/crowd.py ENDPOINT CLIENTS PROMPT ANSWER VOCABULARY. Each line that comes on the
standard input is answered by a line of JSON, the counters since the start (``Counters``).
"""

from __future__ import annotations

import json
import random
import select
import socket
import sys
import time
from array import array
from dataclasses import asdict, dataclass, field

from evenflow.control.wire import (
    PROTOCOL_VERSION,
    ClientHello,
    ClientPing,
    Refused,
    Submit,
    Tick,
    ToClient,
    Welcome,
    decode_to_client,
    encode,
)

#: A turn comes about twice as often as a token does.
TURN_S = 0.0125
PING_S = 1.0
READ_BYTES = 1 << 16

# ZMTP 3.0: both sides send a greeting (signature, version, mechanism, padding) and the command READY; from then on
# every message is a frame: flags, length, body.
_GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
_PROPERTIES = b"\x0bSocket-Type\x00\x00\x00\x06DEALER" + b"\x08Identity\x00\x00\x00\x00"
_READY = b"\x04" + bytes([6 + len(_PROPERTIES)]) + b"\x05READY" + _PROPERTIES
_LONG, _COMMAND = 2, 4


def frame_of(body: bytes) -> bytes:
    """A message of one frame."""
    if len(body) < 256:
        return bytes((0, len(body))) + body
    return bytes((_LONG,)) + len(body).to_bytes(8) + body


def read_exactly(source: socket.socket, size: int) -> bytes:
    """``size`` bytes. Raises ``OSError``."""
    data = b""
    while len(data) < size:
        more = source.recv(size - len(data))
        if not more:
            raise ConnectionError("the other side has hung up")
        data += more
    return data


def dial(endpoint: str) -> socket.socket:
    """A connection that has shaken hands. Raises ``OSError``."""
    dialled = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    dialled.settimeout(10)
    dialled.connect(endpoint.removeprefix("ipc://"))
    dialled.sendall(_GREETING)
    answer = read_exactly(dialled, 64)
    if answer[:1] != b"\xff" or answer[9:11] != b"\x7f\x03" or not answer[12:].startswith(b"NULL"):
        raise ConnectionError("the other side does not speak ZMTP 3 without keys")
    dialled.sendall(_READY)
    flags, size = read_exactly(dialled, 2)
    if flags != _COMMAND or not read_exactly(dialled, size).startswith(b"\x05READY"):
        raise ConnectionError("the other side is not ready")
    dialled.setblocking(False)
    return dialled


@dataclass(slots=True)
class Counters:
    """What the crowd has seen so far. ``lags_ms``: how late its turns were since the last answer, in 99 % of them
    and in the worst."""

    welcomed: int = 0
    ended: int = 0
    tokens: int = 0
    #: Tokens that were not the expected ones, gaps in a stream, refusals, messages of an unexpected kind.
    faults: int = 0
    first_fault: str = ""
    lags_ms: list[float] = field(default_factory=list[float])


class Member:
    """One client."""

    __slots__ = ("key", "received", "rest", "sequence", "slot", "socket")

    def __init__(self, dialled: socket.socket) -> None:
        self.socket = dialled
        self.rest = b""  #: the beginning of a message
        self.key = 0
        self.received = 0
        self.sequence = 0  #: of the next tick
        self.slot = -1  #: owned by the running request


class Crowd:
    """All clients. The workers are blank: a token is 1 + its own position modulo (vocabulary - 1)."""

    def __init__(self, endpoint: str, clients: int, prompt: int, answer: int, vocabulary: int) -> None:
        self.counters = Counters()
        self._prompt = prompt
        self._answer = answer
        self._modulus = vocabulary - 1
        self._random = random.Random(5)
        self._members = [Member(dial(endpoint)) for _ in range(clients)]

    def run(self) -> None:
        """Until the standard input ends."""
        members = self._members
        hello, ping = frame_of(encode(ClientHello(PROTOCOL_VERSION, "crowd"))), frame_of(encode(ClientPing()))
        by_descriptor = {member.socket.fileno(): member for member in members}
        readable = select.epoll()
        for descriptor, member in by_descriptor.items():
            readable.register(descriptor, select.EPOLLIN)
            member.socket.send(hello)
        commands = select.poll()
        commands.register(0, select.POLLIN)
        began = due = time.monotonic()
        pinged = 0
        lags: list[float] = []
        while True:
            lags.append((time.monotonic() - due) * 1e3)
            for descriptor, _ in readable.poll(0, len(members)):
                self._read(by_descriptor[descriptor])
            # Everybody pings once a second, spread over it.
            until = int((time.monotonic() - began) / PING_S * len(members))
            for turn in range(pinged, min(until, pinged + len(members))):
                members[turn % len(members)].socket.send(ping)
            pinged = until
            if commands.poll(0):
                if not sys.stdin.readline():
                    return
                lags.sort()
                self.counters.lags_ms = [lags[int(0.99 * (len(lags) - 1))], lags[-1]]
                lags = []
                print(json.dumps(asdict(self.counters)), flush=True)
            now = time.monotonic()
            due = max(due + TURN_S, now)
            time.sleep(due - now)

    def _read(self, member: Member) -> None:
        data = member.rest + member.socket.recv(READ_BYTES)
        at, size = 0, len(data)
        while size - at > 1:
            flags, length, body = data[at], data[at + 1], at + 2
            if flags & _LONG:
                length, body = int.from_bytes(data[at + 1 : at + 9]), at + 9
            if size - body < length:
                break
            at = body + length
            message = decode_to_client(data[body:at])
            if type(message) is Tick:
                self._tick(member, message)
            else:
                self._other(member, message)
        member.rest = data[at:]

    def _tick(self, member: Member, tick: Tick) -> None:
        counters = self.counters
        if tick.sequence != member.sequence:
            self._fault(f"tick {tick.sequence} instead of {member.sequence}")
        member.sequence = tick.sequence + 1
        if tick.start_slots:
            member.slot = int.from_bytes(tick.start_slots, "little")
            if int.from_bytes(tick.start_keys, "little") != member.key:
                self._fault("a start of another request")
        if tick.live:
            at = 4 * member.slot if tick.dense else 0
            token = int.from_bytes(tick.ids[at : at + 4], "little")
            expected = 1 + (self._prompt + member.received) % self._modulus
            if token != expected or int.from_bytes(tick.live, "little") != 1 << member.slot:
                self._fault(f"token {token} in slot {member.slot}, not {expected}")
            member.received += 1
            counters.tokens += 1
        for end in tick.ends:
            if end.key != member.key or end.reason != "length" or end.output_tokens != member.received:
                self._fault(f"{end.reason} of request {end.key} after {member.received} tokens")
            counters.ended += 1
            self._submit(member, self._random.randrange(self._answer // 2, 3 * self._answer // 2))

    def _other(self, member: Member, message: ToClient) -> None:
        if isinstance(message, Welcome):
            if message.ready and not member.key:
                self.counters.welcomed += 1
                self._submit(member, self._random.randrange(1, self._answer + 1))
        else:
            self._fault(message.message if isinstance(message, Refused) else type(message).__name__)

    def _submit(self, member: Member, answer: int) -> None:
        member.key += 1
        member.received = 0
        tokens = array("I", (self._random.randrange(1, self._modulus) for _ in range(self._prompt))).tobytes()
        submit = Submit(member.key, f"request-{member.key}", tokens, self._prompt, answer)
        member.socket.sendall(frame_of(encode(submit)))

    def _fault(self, what: str) -> None:
        self.counters.faults += 1
        if not self.counters.first_fault:
            self.counters.first_fault = what


def main() -> int:
    endpoint, *numbers = sys.argv[1:]
    clients, prompt, answer, vocabulary = map(int, numbers)
    Crowd(endpoint, clients, prompt, answer, vocabulary).run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
