"""The ``events`` socket: it knows whether anybody listens, and nobody who listens badly can hold it up."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from evenflow.control import publisher as publishing
from evenflow.control.publisher import Publisher
from evenflow.control.wire.sockets import (
    EVENTS_HWM,
    WireContext,
    close_context,
    dial_dealer,
    dial_publisher,
    new_context,
)


@pytest.fixture
def context() -> Iterator[WireContext]:
    made = new_context()
    yield made
    close_context(made)


@pytest.fixture
def publisher(context: WireContext, tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(context, f"ipc://{tmp_path}/events")
    yield made
    made.close()


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_is_watched_while_somebody_subscribes(context: WireContext, publisher: Publisher, tmp_path: Path) -> None:
    assert publisher.endpoint == f"ipc://{tmp_path}/events" and not publisher.watched()
    publisher.publish(b"nobody gets this")
    first, second = (dial_publisher(context, publisher.endpoint) for _ in range(2))
    until(publisher.watched)
    second.close(0)
    publisher.publish(b"record")
    first.setsockopt(zmq.RCVTIMEO, 30_000)
    assert first.recv() == b"record" and publisher.watched()
    first.close(0)
    until(lambda: not publisher.watched())


def test_a_subscriber_that_does_not_read_loses_records_and_holds_nobody_up(
    context: WireContext, publisher: Publisher
) -> None:
    lazy = dial_publisher(context, publisher.endpoint, hwm=8)
    until(publisher.watched)
    for number in range(100 * EVENTS_HWM):
        publisher.publish(b"%05d" % number + bytes(1000))
    lazy.setsockopt(zmq.RCVTIMEO, 1000)
    got = 0
    try:
        while lazy.recv():
            got += 1
    except zmq.Again:
        pass
    lazy.close(0)
    assert 0 < got < 50 * EVENTS_HWM


def test_nonsense_on_the_socket_changes_nothing(context: WireContext, publisher: Publisher) -> None:
    stranger = dial_dealer(context, publisher.endpoint)
    loud = context.socket(zmq.XSUB)
    loud.connect(publisher.endpoint)
    for frame in (b"", b"\x02what", b"\x00never subscribed", bytes(900), bytes(5000)):
        loud.send(frame)
    listener = dial_publisher(context, publisher.endpoint)
    until(publisher.watched)
    listener.close(0)
    until(lambda: not publisher.watched())
    stranger.close(0)
    loud.close(0)


def test_sec_1_what_a_subscriber_says_is_not_collected(
    context: WireContext, publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it sends waits in its own connection until it is taken, and only so many topics are remembered."""
    monkeypatch.setattr(publishing, "_MAX_TOPICS", 20)
    monkeypatch.setattr(publishing, "_MAX_TOPICS", 20)
    loud = context.socket(zmq.XSUB)
    loud.setsockopt(zmq.LINGER, 0)
    loud.setsockopt(zmq.SNDHWM, 10)
    loud.connect(publisher.endpoint)
    for _ in range(2000):
        loud.send(b"no subscription")
        assert not publisher.watched()
    for number in range(3000):
        loud.send(b"\x01%d" % number)
        publisher.watched()
    until(lambda: publisher.watched() and len(publisher._topics) == 20)
    loud.close(0)
    until(lambda: not publisher.watched())
