"""What a client is told of a frame that is no message, and that this costs nothing, whatever the frame is."""

import msgpack
import msgspec
import pytest
from evenflow.control.refusals import refuse_frame
from evenflow.control.wire import Refused, WireError, decode_from_client
from hostile import Hostile
from hypothesis import given
from hypothesis import strategies as st


def refuse(frame: bytes) -> Refused:
    with pytest.raises(WireError) as caught:
        decode_from_client(frame)
    return refuse_frame(frame, caught.value)


@pytest.mark.parametrize("key", [0, 127, 128, 255, 256, 65_535, 65_536, (1 << 32) - 1, 1 << 32, (1 << 64) - 1])
@pytest.mark.parametrize("head", [b"\x93", b"\xdc\x00\x03", b"\xdd\x00\x00\x00\x03"])
def test_the_request_is_named_however_its_number_is_written(key: int, head: bytes) -> None:
    for number in (msgpack.packb(key), b"\xcf" + key.to_bytes(8, "big")):
        refused = refuse(head + b"\x21" + number + b"\xa1r")
        assert (refused.key, refused.code, refused.field) == (key, "invalid", "tokens")


def test_a_request_that_is_cut_off_is_named_too() -> None:
    refused = refuse(msgpack.packb([33, 9, "r", b"1234", 1])[:-3])
    assert (refused.key, refused.code) == (9, "invalid")
    assert refuse(b"\x95\x21\xcf\x00\x01").key is None


@pytest.mark.parametrize("key", [-1, 1.0, True, None, "5", b"5", [5]])
def test_what_is_no_number_names_no_request(key: object) -> None:
    assert refuse(msgpack.packb([33, key, "r", b"1234", 1])).key is None


@pytest.mark.parametrize("tag", [33, 99])
def test_sec_1_of_millions_of_entries_no_object_is_made(monkeypatch: pytest.MonkeyPatch, tag: int) -> None:
    """A frame of empty maps once took seconds, and a hundred times its size, to be refused."""
    monkeypatch.setattr(msgspec.msgpack, "decode", lambda _: pytest.fail("the whole frame was decoded"))
    count = 1_000_000
    refused = refuse(b"\xdd" + count.to_bytes(4, "big") + bytes([tag, 5]) + b"\x80" * (count - 2))
    assert refused.key == (5 if tag == 33 else None)


@pytest.mark.parametrize("seed", range(4))
def test_sec_1_whatever_comes_is_answered(seed: int) -> None:
    hostile = Hostile(seed, "from client")
    answers = 0
    for _ in range(2000):
        for frame in hostile.message():
            try:
                decode_from_client(frame)
            except WireError as error:
                refused = refuse_frame(frame, error)
                assert refused.code in ("invalid", "protocol") and len(refused.message) < 1300
                answers += 1
    assert answers > 1000


@given(st.binary(max_size=40) | st.binary(max_size=20).map(lambda rest: b"\x92\x21" + rest))
def test_sec_1_any_bytes_are_answered(frame: bytes) -> None:
    assert refuse_frame(frame, WireError("no")).code in ("invalid", "protocol")
