"""What a peer of a ROUTER says first, by the bytes."""

from evenflow.control.wire.zmtp import GREETING


def ready(kind: bytes = b"DEALER") -> bytes:
    """READY of a peer of that kind."""
    data = b"\x0bSocket-Type" + len(kind).to_bytes(4) + kind + b"\x08Identity\x00\x00\x00\x03abc"
    body = b"\x05READY" + data
    return bytes((4, len(body))) + body


#: A handshake.
SHAKEN = GREETING + ready()
