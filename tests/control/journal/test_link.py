"""What is handed to the writer of a journal arrives whole and in order, however large it is and however small the
ring; and a writer that reads nothing, or is dead, keeps nobody waiting for long."""

import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from evenflow.control.core.events import Aborted, Submitted
from evenflow.control.journal.link import JournalLink
from evenflow.control.journal.recorder import Item, decode_items
from evenflow.control.wire import Submit
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import msgpack

SMALL = 1 << 12
#: Writes what is handed over to a file, a message a line, in hexadecimal digits.
KEEP = """
import sys, time
from evenflow.control.journal.ring import RingClosed, RingReader
ring = RingReader(*map(int, sys.argv[-3:]))
time.sleep(float(sys.argv[2]))
with open(sys.argv[1], "w") as file:
    try:
        while True:
            for message in ring.messages(1.0):
                print(message.hex(), file=file)
    except RingClosed:
        pass
"""
SLEEP = "import time; time.sleep(600)"

encode = msgpack.encode


def prompt(key: int, tokens: int) -> list[Item]:
    return [1.0 * key, Submitted(0, Submit(key, "", bytes([key % 251]) * (4 * tokens), tokens))]


def kept(path: Path) -> list[list[Item]]:
    return [decode_items(bytes.fromhex(line)) for line in path.read_text().splitlines()]


def keeper(path: Path, delay: float = 0.0, most_waiting: int = 1 << 30) -> JournalLink:
    return JournalLink([sys.executable, "-c", KEEP, str(path), str(delay)], SMALL, most_waiting)


@settings(max_examples=8, deadline=None)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.sampled_from([0.0, 0.1]))
def test_batches_of_any_size_arrive_whole_and_in_order(sizes: list[int], delay: float) -> None:
    path = Path(f"/tmp/journal-link-{time.monotonic_ns()}")
    link = keeper(path, delay)
    batches = [prompt(i, size) for i, size in enumerate(sizes)]
    for i, batch in enumerate(batches):
        link.hand(encode(batch), i % 3 == 0)
    link.close()
    assert not link.lost
    try:
        assert kept(path) == batches
    finally:
        path.unlink()


def test_what_is_many_times_the_ring_arrives_when_the_control_process_ends_at_once(tmp_path: Path) -> None:
    link = keeper(tmp_path / "kept")
    batches = [prompt(1, 20 * SMALL), prompt(2, 1), prompt(3, SMALL)]
    for batch in batches:
        link.hand(encode(batch), False)
    link.close()
    assert not link.lost and kept(tmp_path / "kept") == batches


def test_what_waits_moves_on_with_the_ticks_of_the_control_process(tmp_path: Path) -> None:
    link = keeper(tmp_path / "kept")
    link.hand(encode(prompt(1, 20 * SMALL)), False)
    deadline = time.monotonic() + 60.0
    while link.waiting and time.monotonic() < deadline:
        link.hand(b"", True)
        time.sleep(0.001)
    assert not link.waiting and not link.lost
    link.close()
    assert kept(tmp_path / "kept") == [prompt(1, 20 * SMALL)]


def ended(link: JournalLink) -> None:
    link.process.kill()
    link.process.wait()


def test_a_writer_that_ends_in_the_middle_of_a_large_batch_loses_the_journal_and_nothing_else(tmp_path: Path) -> None:
    link = keeper(tmp_path / "kept", 60.0)
    link.hand(encode(prompt(1, 20 * SMALL)), True)
    assert link.waiting and not link.lost
    ended(link)
    link.hand(encode([Aborted(0, 1)]), True)
    assert link.lost and not link.waiting
    link.hand(encode(prompt(2, 1)), True)
    start = time.monotonic()
    link.close()
    assert time.monotonic() - start < 2.0


@pytest.mark.parametrize("harm", [ended, lambda link: None], ids=["dead", "asleep"])
def test_the_end_waits_for_a_writer_only_so_long(harm: Callable[[JournalLink], None]) -> None:
    link = JournalLink([sys.executable, "-c", SLEEP], SMALL, patience=0.3)
    link.hand(encode(prompt(1, 20 * SMALL)), True)
    assert link.waiting
    harm(link)
    start = time.monotonic()
    link.close()
    assert link.lost and time.monotonic() - start < 5.0
    ended(link)


def test_what_waits_is_bounded() -> None:
    link = JournalLink([sys.executable, "-c", SLEEP], SMALL, 1 << 16, patience=0.1)
    for key in range(1000):
        link.hand(encode(prompt(key, 100)), False)
        assert link.waiting <= (1 << 16)
    assert link.lost and not link.waiting
    link.close()
    ended(link)
