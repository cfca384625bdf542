"""A journal's file may come from anywhere: what is wrong with it is told, and nothing else happens."""

import struct
import zlib
from dataclasses import fields
from pathlib import Path

import msgspec
import pytest
from evenflow.control.core.engine import Engine
from evenflow.control.core.events import Limits
from evenflow.control.core.slo import parse_slo
from evenflow.control.journal.files import MAX_INFLATED, JournalError, JournalFile, frame, head
from evenflow.control.journal.image import ImageError, dump, load
from evenflow.control.journal.records import Cancelled, Opening, Piece, Rang, Record, Settings, limits_of, settings_of
from evenflow.control.journal.replay import Journal, replay
from hypothesis import given, settings
from hypothesis import strategies as st

LIMITS = Limits(slo=parse_slo("100ms"), tenant_weights=(("a", 2.0),))
OPENING = Opening("test", 0, False, 1, settings_of(LIMITS), 0.0, 0.0)
RECORDS: list[list[Record]] = [[OPENING, Rang(1.0)], [Cancelled(2.0, -1, 0)], [Rang(3.0), Rang(4.0)]]


def data() -> bytes:
    return head() + b"".join(map(frame, RECORDS))


def read(path: Path) -> list[Record]:
    return list(JournalFile(path))


def raw(payload: bytes, crc: int | None = None, length: int | None = None) -> bytes:
    return struct.pack("<II", length or len(payload), zlib.crc32(payload) if crc is None else crc) + payload


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(data())
    file = JournalFile(path)
    assert list(file) == [record for records in RECORDS for record in records]
    assert file.note == "" and file.opening == OPENING


def test_every_limit_is_recorded() -> None:
    assert set(Settings.__struct_fields__) == {field.name for field in fields(Limits)}
    assert limits_of(settings_of(LIMITS)) == LIMITS


def test_a_tail_of_any_length_is_passed_over_and_told(tmp_path: Path) -> None:
    path, whole = tmp_path / "j", data()
    ends = [len(head() + b"".join(map(frame, RECORDS[: i + 1]))) for i in range(3)]
    for size in range(ends[0], ends[2]):
        path.write_bytes(whole[:size])
        file = JournalFile(path)
        found = list(file)
        frames = sum(end <= size for end in ends)
        assert found == [record for records in RECORDS[:frames] for record in records]
        assert ("is not whole" in file.note) is (size not in ends)
    path.write_bytes(whole[:-1] + b"\xff")
    file = JournalFile(path)
    assert len(list(file)) == 3 and "damaged" in file.note


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not a journal"),
        (b"PK\x03\x04 something else", "not a journal"),
        (head()[:-1], "before its first frame"),
        (head(), "before its first frame"),
        (head() + frame([OPENING])[:-3], "before its first frame"),
        (head()[:-2] + struct.pack("<H", 77), "version 77"),
        (head() + raw(b"x" * 40, crc=1) + frame([OPENING]), "sum is wrong"),
        (head() + raw(zlib.compress(b"\xc1")) + frame([OPENING]), "byte 19"),
        (head() + raw(b"not deflated") + frame([OPENING]), "byte 19"),
        (head() + frame([Rang(1.0), OPENING]), "opening is not the first"),
        (head() + frame([OPENING, OPENING]), "opening is not the first"),
        (head() + raw(zlib.compress(b"\0" * (MAX_INFLATED + 1), 9)) + frame([OPENING]), "more than"),
        (head() + raw(zlib.compress(b"\x91" * 100_000)) + frame([OPENING]), "byte 19"),
        (head() + raw(zlib.compress(msgspec.msgpack.encode([[3, "now", 1, 2]]))) + frame([OPENING]), "byte 19"),
    ],
)
def test_what_is_no_journal_is_refused(content: bytes, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(content)
    with pytest.raises(JournalError, match=problem):
        read(path)
    with pytest.raises(JournalError, match=problem):
        replay(Journal(path))


def test_a_claim_of_a_huge_frame_costs_nothing(tmp_path: Path) -> None:
    path = tmp_path / "j"
    path.write_bytes(head() + frame([OPENING]) + struct.pack("<II", 0xFFFFFFFF, 0) + b"x")
    file = JournalFile(path)
    assert list(file) == [OPENING] and "is not whole" in file.note


def test_a_folder_or_nothing_is_told_as_the_system_does(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(JournalError, match=str(path)):
            read(path)


@pytest.mark.parametrize(
    "image",
    [
        b"",
        b"\x93",
        msgspec.msgpack.encode([]),
        msgspec.msgpack.encode([["object", "Engine", "limits", [0]]]),
        msgspec.msgpack.encode([["object", "Popen"]]),
        msgspec.msgpack.encode([["object", "Engine", "__class__", 3]]),
        msgspec.msgpack.encode([["object", "Engine", "no_such", 3]]),
        msgspec.msgpack.encode([["object", "Engine", "step", 3]]),
        msgspec.msgpack.encode([["object", "Engine", 3, 3]]),
        msgspec.msgpack.encode([["object", "Engine", [1], 3]]),
        msgspec.msgpack.encode([["object", "Lane", "no_such", 3]]),
        msgspec.msgpack.encode([["list", [5]]]),
        msgspec.msgpack.encode([["tuple", [0]]]),
        msgspec.msgpack.encode([["list", [-1]]]),
        msgspec.msgpack.encode([["enum", "Phase", 99]]),
    ],
)
def test_a_state_that_is_none_of_the_core_is_refused(image: bytes, tmp_path: Path) -> None:
    path = tmp_path / "j"
    opening = msgspec.structs.replace(OPENING, part=1, pieces=1)
    path.write_bytes(head() + frame([opening, Piece(image)]))
    with pytest.raises(JournalError, match=r"begins in the middle of a run|not whole"):
        Journal(path)


def test_a_state_that_lacks_an_attribute_is_refused() -> None:
    """As one of a core that did not have it: what the object was made with would stand in for it."""
    image = dump(Engine(LIMITS))
    assert type(load(image, LIMITS)) is Engine
    entries = msgspec.msgpack.decode(image)
    at = entries[0].index("now")
    entries[0] = entries[0][:at] + entries[0][at + 2 :]
    with pytest.raises(ImageError, match="'now'"):
        load(msgspec.msgpack.encode(entries), LIMITS)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, len(data()) - 1), st.integers(1, 255), st.integers(0, 40))
def test_damage_is_found_or_at_the_end(at: int, flip: int, cut: int) -> None:
    damaged = bytearray(data())
    damaged[at] ^= flip
    path = Path(f"/tmp/journal-{flip}-{at}-{cut}")
    path.write_bytes(bytes(damaged[: len(damaged) - cut]))
    try:
        found = read(path)
        assert found == [record for records in RECORDS for record in records][: len(found)]
    except JournalError:
        pass
    finally:
        path.unlink()
