"""Streams of ZMTP, cut anywhere: what a ROUTER makes of them. What ZeroMQ itself says is in ``test_local_router``."""

from itertools import pairwise

import pytest
from evenflow.control.wire.fields import MAX_MESSAGE_BYTES
from evenflow.control.wire.zmtp import GREETING, READY, Incoming, ZmtpError, framed, message
from hypothesis import given
from hypothesis import strategies as st
from zmtp_peer import SHAKEN, ready


def taken(*pieces: bytes, most: int = 1000) -> tuple[list[bytes | None], bytes, Incoming]:
    """Messages, replies and the state after ``pieces`` have come one by one."""
    incoming = Incoming()
    found: list[bytes | None] = []
    replies = b""
    for piece in pieces:
        incoming.feed(piece)
        found += incoming.messages(most)
        replies += incoming.reply
        incoming.reply = b""
    return found, replies, incoming


@given(
    st.lists(st.lists(st.binary(max_size=600), min_size=1, max_size=3), max_size=6),
    st.lists(st.integers(0, 4000), max_size=8),
)
def test_messages_come_as_they_were_sent_wherever_the_stream_is_cut(sent: list[list[bytes]], cuts: list[int]) -> None:
    stream = SHAKEN + b"".join(message(frames) for frames in sent)
    edges = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    found, replies, incoming = taken(*(stream[a:b] for a, b in pairwise(edges)))
    assert found == [frames[0] if len(frames) == 1 else None for frames in sent]
    assert replies == READY and incoming.ready


@pytest.mark.parametrize("size", [0, 1, 255, 256, 70_000, MAX_MESSAGE_BYTES])
def test_sizes(size: int) -> None:
    body = bytes(size)
    assert taken(SHAKEN, framed(body))[0] == [body]
    # The header is as short as can be.
    assert len(framed(body)) - size == (2 if size < 256 else 9)


def test_no_more_messages_are_taken_than_asked_for() -> None:
    incoming = Incoming()
    incoming.feed(SHAKEN + b"".join(framed(bytes((n,))) for n in range(5)))
    assert incoming.messages(2) == [b"\0", b"\1"]
    assert incoming.messages(2) == [b"\2", b"\3"]
    assert incoming.messages(2) == [b"\4"]
    assert incoming.messages(2) == []


@pytest.mark.parametrize("kind", [b"DEALER", b"REQ", b"ROUTER"])
def test_who_may_dial(kind: bytes) -> None:
    found, _, incoming = taken(GREETING + ready(kind), framed(b"x"))
    assert found == [b"x"] and incoming.ready


def test_a_ping_is_answered_with_its_context() -> None:
    found, replies, _ = taken(SHAKEN, b"\x04\x0a\x04PING\x00\x05abc", framed(b"x"), b"\x04\x05\x04PONG")
    assert found == [b"x"] and replies == READY + b"\x04\x08\x04PONGabc"


def test_frames_without_end_are_not_kept() -> None:
    found, _, incoming = taken(SHAKEN, *[b"\x01\xff" + bytes(255)] * 1000)
    assert found == [] and len(incoming._data) == 0
    incoming.feed(framed(b"end"))
    assert incoming.messages(1) == [None]


@pytest.mark.parametrize(
    "stream",
    [
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01",
        b"\xff" + bytes(8) + b"\x7e",  # the signature's last bit
        GREETING[:10] + b"\x01",  # ZMTP 2.0
        GREETING[:12] + b"PLAIN".ljust(52, b"\0"),
        GREETING[:12] + b"CURVE".ljust(52, b"\0"),
        GREETING[:12] + b"NULLX".ljust(52, b"\0"),
        GREETING + framed(b"too early"),
        GREETING + ready(b"PUB"),
        GREETING + ready(b"DEALERX"),
        GREETING + ready(b""),
        GREETING + b"\x04\x00",
        GREETING + b"\x04\x06\x05HELLO",
        GREETING + b"\x06" + (4097).to_bytes(8),
        SHAKEN + b"\x02" + (MAX_MESSAGE_BYTES + 1).to_bytes(8),
        SHAKEN + b"\x03" + ((1 << 64) - 1).to_bytes(8),
        SHAKEN + b"\x05\x00",  # a command with more to come
        SHAKEN + b"\x08\x00",  # a flag that does not exist
        SHAKEN + b"\xff\x00",
    ],
)
def test_strangers_are_known_at_once(stream: bytes) -> None:
    with pytest.raises(ZmtpError):
        taken(stream)
    with pytest.raises(ZmtpError):
        taken(*(stream[n : n + 1] for n in range(len(stream))))


@given(st.binary(max_size=300), st.booleans())
def test_whatever_comes_is_taken_or_refused(data: bytes, shaken: bool) -> None:
    incoming = Incoming()
    incoming.feed(SHAKEN + data if shaken else data)
    try:
        found = incoming.messages(1000)
    except ZmtpError:
        return
    assert sum(len(one or b"") for one in found) <= len(data)
