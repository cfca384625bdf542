"""What ZeroMQ peers say to each other on a stream: ZMTP 3.0 (RFC 23) with the mechanism NULL, the side of a ROUTER.
Sans-I/O.

Both sides send a greeting and the command READY; from then on the stream is messages of one or several frames, each
of which has its flags and its length before it.
"""

from __future__ import annotations

from .fields import MAX_MESSAGE_BYTES

#: Signature, version, mechanism, role (a client) and filler.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
#: Of a greeting: what comes before the mechanism, and the mechanism.
_SIGNATURE, _MECHANISM = 10, slice(12, 32)
_MORE, _LONG, _COMMAND = 1, 2, 4
#: No command that counts here is longer.
_MAX_COMMAND = 4096
#: Who may dial a ROUTER, as the property of READY that says so.
_KINDS = [b"\x0bSocket-Type" + len(kind).to_bytes(4) + kind for kind in (b"DEALER", b"REQ", b"ROUTER")]
#: Flags and length of frames that end a message, by their length.
_HEADERS = [bytes((0, size)) for size in range(256)]


class ZmtpError(ValueError):
    """The stream is not that of a peer that may dial here: it cannot be gone on with."""


def framed(body: bytes) -> bytes:
    """A message of one frame."""
    size = len(body)
    return _HEADERS[size] + body if size < 256 else bytes((_LONG,)) + size.to_bytes(8) + body


def message(frames: list[bytes]) -> bytes:
    """A message of at least one frame."""
    if len(frames) == 1:
        return framed(frames[0])
    parts: list[bytes] = []
    for frame in frames[:-1]:
        parts += [bytes((_MORE | _LONG,)), len(frame).to_bytes(8), frame]
    return b"".join([*parts, framed(frames[-1])])


def _command(name: bytes, data: bytes) -> bytes:
    body = bytes((len(name),)) + name + data
    return bytes((_COMMAND, len(body))) + body


READY = _command(b"READY", b"\x0bSocket-Type\x00\x00\x00\x06ROUTER" + b"\x08Identity\x00\x00\x00\x00")


class Incoming:
    """What one peer sends. ``feed`` what has come, ``messages`` takes out what is whole, ``reply`` is to be sent."""

    __slots__ = ("_data", "_greeted", "_parts", "ready", "reply")

    def __init__(self) -> None:
        self.ready = False  #: the handshake is done
        self.reply = b""  #: what the handshake or a ping wants to have sent; whoever sends it empties it
        self._data = bytearray()
        self._greeted = False
        self._parts = 0  #: frames so far of a message that has not ended

    def feed(self, data: bytes) -> None:
        """Take in what has come on the stream."""
        self._data += data

    def messages(self, most: int) -> list[bytes | None]:
        """Take out at most ``most`` messages; if there are fewer, no more has come. One of several frames, which no
        peer of this protocol sends, is None. Raises ``ZmtpError``."""
        found: list[bytes | None] = []
        data = self._data
        if not self._greeted and not self._greet(data):
            return found
        at, size = 0, len(data)
        while len(found) < most and size - at > 1:
            flags = data[at]
            if flags > _LONG | _COMMAND or flags == _COMMAND | _MORE:
                raise ZmtpError(f"a frame with flags {flags}")
            if flags & _LONG:
                body = at + 9
                if size < body:
                    break
                length = int.from_bytes(data[at + 1 : body])
            else:
                length, body = data[at + 1], at + 2
            if length > (_MAX_COMMAND if flags & _COMMAND else MAX_MESSAGE_BYTES):
                raise ZmtpError(f"a frame of {length} bytes, at most {MAX_MESSAGE_BYTES} are accepted")
            if size - body < length:
                break
            at = body + length
            if flags & _COMMAND:
                self._obey(bytes(data[body:at]))
            elif not self.ready:
                raise ZmtpError("a message before READY")
            elif flags & _MORE:
                self._parts += 1
            elif self._parts:
                self._parts = 0
                found.append(None)
            else:
                found.append(bytes(data[body:at]))
        del data[:at]
        return found

    def _greet(self, data: bytearray) -> bool:
        """Whether the greeting is there."""
        if (data and data[0] != 0xFF) or (len(data) >= _SIGNATURE and not data[9] & 1):
            raise ZmtpError("it does not speak ZMTP")
        if len(data) > _SIGNATURE and data[_SIGNATURE] < 3:
            raise ZmtpError("it speaks ZMTP before 3.0")
        if len(data) < len(GREETING):
            return False
        mechanism = bytes(data[_MECHANISM]).rstrip(b"\0")
        if mechanism != b"NULL":
            raise ZmtpError(f"its mechanism is {mechanism!r}")
        del data[: len(GREETING)]
        self._greeted = True
        self.reply += READY
        return True

    def _obey(self, command: bytes) -> None:
        size = command[0] if command else 0
        name, rest = command[1 : 1 + size], command[1 + size :]
        if not self.ready:
            if name != b"READY" or not any(kind in rest for kind in _KINDS):
                raise ZmtpError("it is not ready to talk to a ROUTER")
            self.ready = True
        elif name == b"PING":
            # Its first two bytes are how long an answer may take, the rest is returned.
            self.reply = _command(b"PONG", rest[2:18])
