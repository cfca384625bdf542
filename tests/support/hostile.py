"""Frames that no honest peer sends, drawn by a seed: what every socket of a running system is fed (case SEC-1).

``Hostile(seed, direction)`` draws messages (lists of frames) for a socket that takes the messages of ``direction``.
The same seed draws the same messages. They are made from the golden messages, so a new message of the protocol is
among them by itself. No frame is honest, but many are valid: a value out of its range or a message out of its time.
"""

import os
import pickle
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import msgpack
from golden import DECODERS, GOLDEN

Direction = Literal["to worker", "from worker", "to client", "from client", "record"]
DIRECTIONS: tuple[Direction, ...] = get_args(Direction)

#: Fields of each golden message, its tag first, by direction.
_FIELDS: dict[Direction, list[list[Any]]] = {
    direction: [
        msgpack.unpackb(bytes.fromhex(golden))
        for message, golden in GOLDEN
        if type(message) in (get_args(union) or (union,))
    ]
    for direction, (union, _) in zip(DIRECTIONS, DECODERS, strict=True)
}
_EDGES = (0, 1, 2, 7, 15, 16, 63, 255, 256, 4096, 65_534, 65_535, 1 << 21, (1 << 21) + 1, (1 << 31) - 1, 1 << 31)
_EDGES += ((1 << 32) - 1, 1 << 32, 1 << 53, (1 << 63) - 1, 1 << 63, (1 << 64) - 1, -1, -(1 << 31), -(1 << 63))
_FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 5e-324, 1e-300, 1e300, -1e300, float("inf"), float("-inf"), float("nan"))
_TEXTS = ("", "x", "stop", "paused", "length", "\0", "é" * 200, "a" * 256, "a" * 257, "/", "{}", "\u202e", "\n" * 30)
#: Headers of MessagePack that claim far more than follows.
_CLAIMS = (
    b"\xdd\xff\xff\xff\xff",
    b"\xdd\x00\xff\xff\xff",
    b"\xdc\xff\xff",
    b"\xdf\xff\xff\xff\xff",
    b"\xde\xff\xff",
    b"\xc6\x7f\xff\xff\xff",
    b"\xc6\xff\xff\xff\xff",
    b"\xdb\x7f\xff\xff\xff",
    b"\xc9\x7f\xff\xff\xff\x01",
    b"\xd9\xff",
)


#: Made by whatever unpickles one of the frames: no process may ever do that.
TRAP = Path(tempfile.gettempdir()) / f"evenflow-unpickled-{os.getpid()}"


class Booby:
    """What is unpickled of it is a call that makes ``TRAP``."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mknod, (str(TRAP),)


def _pickles() -> list[bytes]:
    plain: list[Any] = [{"a": [1, 2, 3]}, (b"x" * 100, 1.5, None), "stop", Booby()]
    return [pickle.dumps(value, protocol) for value in plain for protocol in range(pickle.HIGHEST_PROTOCOL + 1)]


class Hostile:
    """Messages for one socket. ``facts`` are numbers that its process holds to be true (epochs, keys, steps): values
    are drawn from them too, so that nonsense comes near to sense. ``drawn`` counts by kind."""

    def __init__(self, seed: int, direction: Direction, facts: Callable[[], Sequence[int]] | None = None) -> None:
        self.draw = random.Random(f"{direction} {seed}")
        self.direction: Direction = direction
        self.drawn: Counter[str] = Counter()
        self._facts = facts
        self._own = _FIELDS[direction]
        self._foreign = [fields for other in DIRECTIONS if other != direction for fields in _FIELDS[other]]
        self._pickled = _pickles()
        kinds: dict[Callable[[], list[bytes]], int] = {
            self.random: 10,
            self.pickled: 8,
            self.claims: 8,
            self.deep: 4,
            self.arity: 10,
            self.types: 12,
            self.version: 3,
            self.values: 25,
            self.timing: 12,
            self.flipped: 10,
            self.cut: 6,
            self.foreign: 5,
            self.parts: 6,
        }
        self._kinds, self._weights = list(kinds), list(kinds.values())

    def message(self) -> list[bytes]:
        """The next one: at least one frame."""
        kind = self.draw.choices(self._kinds, self._weights)[0]
        self.drawn[kind.__name__] += 1
        return kind()

    # ---- what is no message ----------------------------------------------------------------------------------

    def random(self) -> list[bytes]:
        size = self.draw.choice((0, 1, 2, 3, 8, 40, 300, 5000))
        return [self.draw.randbytes(self.draw.randint(0, size))]

    def pickled(self) -> list[bytes]:
        return [self.draw.choice(self._pickled)]

    def claims(self) -> list[bytes]:
        """A length that is not there: alone, or in the place of a field."""
        claim = self.draw.choice(_CLAIMS) + self.draw.randbytes(self.draw.randint(0, 20))
        if self.draw.random() < 0.3:
            return [claim]
        fields = self.draw.choice(self._own)
        at = self.draw.randrange(len(fields))
        head = b"\xdc" + len(fields).to_bytes(2, "big")
        return [head + b"".join(map(_pack, fields[:at])) + claim]

    def deep(self) -> list[bytes]:
        """Nested arrays or maps: alone, as a field, or behind the last field."""
        depth = self.draw.choice((3, 100, 600, 1100, 10_000, 60_000))
        nest = self.draw.choice((b"\x91", b"\x81\xa1a", b"\xdc\x00\x01", b"\x92\x01")) * depth + b"\xc0"
        how = self.draw.random()
        if how < 0.3:
            return [nest]
        fields = self.draw.choice(self._own)
        at = len(fields) if how < 0.6 else self.draw.randrange(1, len(fields) + 1)
        after = fields[at + 1 :]
        head = b"\xdc" + (at + 1 + len(after)).to_bytes(2, "big")
        return [head + b"".join(map(_pack, fields[:at])) + nest + b"".join(map(_pack, after))]

    def arity(self) -> list[bytes]:
        fields = self.draw.choice(self._own)
        if self.draw.random() < 0.6:
            return [_pack(fields[: self.draw.randrange(len(fields) + 1)])]
        return [_pack([*fields, *(self.any() for _ in range(self.draw.choice((1, 2, 20, 300))))])]

    def types(self) -> list[bytes]:
        """A field, or the whole, of another type."""
        if self.draw.random() < 0.1:
            return [_pack(self.any())]
        fields = list(self.draw.choice(self._own))
        fields[self.draw.randrange(len(fields))] = self.any()
        return [_pack(fields)]

    def version(self) -> list[bytes]:
        """A message that says which protocol its sender speaks, of another one."""
        fields = self.draw.choice([f for f in self._own if f[0] in (16, 24, 26, 32, 48)] or self._own)
        return [_pack([fields[0], self.draw.choice((0, 2, 3, 99, (1 << 32) - 1)), *fields[2:]])]

    def flipped(self) -> list[bytes]:
        frame = bytearray(_pack(self.draw.choice(self._own)))
        for _ in range(self.draw.randint(1, 4)):
            frame[self.draw.randrange(len(frame))] = self.draw.randrange(256)
        return [bytes(frame)]

    def cut(self) -> list[bytes]:
        frame = _pack(self.draw.choice(self._own))
        if self.draw.random() < 0.6:
            return [frame[: self.draw.randrange(len(frame))]]
        return [frame + self.draw.randbytes(self.draw.choice((1, 2, 100, 2000)))]

    def foreign(self) -> list[bytes]:
        """A message of another direction."""
        return [_pack(self.draw.choice(self._foreign))]

    def parts(self) -> list[bytes]:
        """Too many frames, and empty ones."""
        how = self.draw.randrange(5)
        frame = _pack(self.draw.choice(self._own))
        if how == 0:
            return [b""] * self.draw.choice((1, 2, 3, 200))
        if how == 1:
            return [frame, *(_pack(self.draw.choice(self._own)) for _ in range(self.draw.choice((1, 3, 30))))]
        if how == 2:
            at = self.draw.randrange(len(frame) + 1)
            return [frame[:at], frame[at:]]
        if how == 3:
            return [b"", frame]
        return [frame, b""]

    # ---- what is one -----------------------------------------------------------------------------------------

    def values(self) -> list[bytes]:
        """The right types, other values."""
        fields = self.draw.choice(self._own)
        tag, *rest = fields
        share = self.draw.choice((0.15, 0.5, 1.0))
        return [_pack([tag, *(self.vary(value) if self.draw.random() < share else value for value in rest)])]

    def timing(self) -> list[bytes]:
        """A golden message, or two of them, at a time that is not theirs; with the numbers of this process."""
        tag, *rest = self.draw.choice(self._own)
        known = self.known()
        if known and rest and self.draw.random() < 0.7:
            rest = [self.draw.choice(known) if type(v) is int and self.draw.random() < 0.4 else v for v in rest]
        return [_pack([tag, *rest])]

    def known(self) -> Sequence[int]:
        return () if self._facts is None else self._facts()

    def vary(self, value: Any) -> Any:
        """Another value of the same type."""
        draw = self.draw
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            known = self.known()
            if known and draw.random() < 0.3:
                return draw.choice(known)
            return draw.choice(_EDGES) if draw.random() < 0.6 else draw.randrange(300)
        if isinstance(value, float):
            return draw.choice(_FLOATS)
        if isinstance(value, str):
            return draw.choice(_TEXTS)
        if isinstance(value, bytes):
            size = draw.choice((0, 1, 2, 3, 4, 8, 12, 16, 64, 260, 1024, 8192))
            return draw.choice((b"\0", b"\xff", b"\1\0\0\0", draw.randbytes(8))) * (size >> 2) + bytes(size & 3)
        if isinstance(value, dict):
            return {draw.choice(_TEXTS): draw.choice(_FLOATS) for _ in range(draw.choice((0, 1, 5)))}
        if isinstance(value, list):
            inner = [self.vary(item) if draw.random() < 0.5 else item for item in value]
            return inner * draw.choice((0, 1, 1, 1, 2, 70))
        return draw.choice((None, *_EDGES))

    def any(self, depth: int = 0) -> Any:
        """Any value of MessagePack."""
        draw = self.draw
        how = draw.randrange(9 if depth < 3 else 6)
        if how < 6:
            return (None, True, draw.choice(_EDGES), draw.choice(_FLOATS), draw.choice(_TEXTS), draw.randbytes(9))[
                how
            ]
        if how < 8:
            return [self.any(depth + 1) for _ in range(draw.randrange(6))]
        return {str(draw.randrange(9)): self.any(depth + 1) for _ in range(draw.randrange(4))}


def _pack(value: Any) -> bytes:
    return msgpack.packb(value, use_bin_type=True)
