"""Clients whose queues are full: nothing is lost, nobody else waits, and too much is too much (case ZMQ-3).

Nothing here takes time: queues are lists of a fixed length, and who reads how much is chosen."""

from array import array
from collections import deque

import pytest
from evenflow.control import merging
from evenflow.control.client_state import ClientState
from evenflow.control.core.events import Delivered, Ended, OwnerLost
from evenflow.control.core.sequence import Sequence
from evenflow.control.delivery import Delivery, Sent
from evenflow.control.merging import Waiting
from evenflow.control.sessions import Session, Sessions
from evenflow.control.wire import (
    NO_SLOT,
    PROTOCOL_VERSION,
    End,
    Merged,
    Refused,
    Sampling,
    StatusReply,
    Submit,
    Tick,
    TokenLogprobs,
    Welcome,
    decode_to_client,
    encode,
)
from inprocess import InProcess, StreamClient, u32
from shadow_server import advance, logprob_of, prompt, scrambled, shadow_server, wanted


class Queues:
    """A queue of each client, and what stands behind them."""

    def __init__(self, room: dict[bytes, int]) -> None:
        self.room = room
        self.frames: dict[bytes, deque[bytes]] = {identity: deque() for identity in room}
        self.sent = 0
        self.woken = 0
        self.sessions = Sessions()
        self.delivery = Delivery(self.sessions, self.send, self.wake)

    def send(self, identity: bytes, frames: list[bytes]) -> Sent:
        if identity not in self.frames:
            return "gone"
        if len(self.frames[identity]) >= self.room[identity]:
            return "full"
        self.frames[identity] += frames
        self.sent += 1
        return "sent"

    def wake(self) -> None:
        self.woken += 1

    def open(self, identity: bytes) -> Session:
        return self.sessions.open(identity, identity.decode(), 0.0)[0]

    def read(self, identity: bytes, client: StreamClient, count: int = 1_000_000) -> int:
        """Let a client read; returns how many messages there were."""
        for n in range(count):
            if not self.frames[identity]:
                return n
            message = decode_to_client(self.frames[identity].popleft())
            if isinstance(message, Merged):
                client.take_merged(message)
            elif isinstance(message, Tick):
                client.take(message)
        return count


def one_request(key: int = 1, owner: int = 0) -> Sequence:
    return Sequence(key, owner, Submit(key, "r", u32(prompt(4)), 4), 1 << 21)


def iteration(step: int, seq: Sequence, slot: int = 2, *, start: bool = False) -> Delivered:
    """One token for ``seq``, whose value is the step."""
    ids = u32([0] * slot + [step])
    bitmap = bytearray(slot // 8 + 1)
    bitmap[slot >> 3] |= 1 << (slot & 7)
    seq.tokens += u32([step])
    return Delivered(0, step, bitmap, ids, seq.owner, [(slot, seq)] if start else [])


def settle(server: InProcess, queues: Queues, names: dict[int, bytes]) -> None:
    """All clients read everything."""
    for round_ in range(1000):
        queues.delivery.retry(1e6 + round_)
        if not sum(queues.read(name, server.clients[owner]) for owner, name in names.items()):
            break
    assert not queues.delivery.slow and not queues.delivery.doomed


@pytest.mark.parametrize("seed", range(12))
def test_slow_clients_get_every_token_once_and_fast_ones_every_tick(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random interleavings on two replicas with few blocks (so that requests are paused) and a crash; client 0 reads
    now and then, client 1 seldom, client 2 at once."""
    monkeypatch.setattr(merging, "UNREAD_S", 1e9)
    server = shadow_server(replicas=2, blocks=14, budget=32, seqs=6)
    names = {0: b"some", 1: b"seldom", 2: b"at once"}
    queues = Queues({b"some": 1 + seed % 3, b"seldom": 1, b"at once": 1})
    choose = scrambled(seed)
    for name in names.values():
        queues.open(name)

    def tell(delivered: Delivered) -> None:
        queues.delivery.deliver(delivered, server.now)
        assert queues.read(names[2], server.clients[2]) <= 1

    server.tell = tell  # type: ignore[method-assign]
    asked: list[tuple[int, int, list[int], int]] = []
    for number in range(15):
        tokens, length, owner = prompt(3 + choose(40), number), 1 + choose(25), number % 3
        key = number
        sampling = Sampling(logprobs=2, prompt_logprobs=1) if number % 2 else None
        server.submit(key, tokens, length, owner=owner, sampling=sampling)
        asked.append((owner, key, tokens, length))
    server.abort(1, owner=1)
    for turn in range(100_000):
        actions = server.actions()
        if not actions:
            break
        action, replica, stage = actions[choose(len(actions))]
        action(replica, stage)
        if turn == 60:
            server.crash(1)
        if choose(6) == 0:
            queues.read(b"some", server.clients[0], 1 + choose(3))
        if choose(40) == 0:
            queues.read(b"seldom", server.clients[1], 1)
        if choose(5) == 0:
            queues.delivery.retry(server.now + choose(2))
    settle(server, queues, names)
    assert queues.delivery.ticks_merged > 20 and not queues.delivery.cut["slow"]
    for owner, key, tokens, length in asked:
        if key == 1:
            assert server.reason(key, owner) == "abort"
            assert server.tokens(key, owner) == wanted(tokens, length)[: len(server.tokens(key, owner))]
        else:
            got = server.tokens(key, owner)
            assert server.reason(key, owner) == "length" and got == wanted(tokens, length)
            known, rows = tokens + got, range(1, len(tokens) + length if key % 2 else 1)
            expected = {i: logprob_of(known, i, 2 if i >= len(tokens) else 1) for i in rows}
            assert server.logprobs_of(key, owner) == expected
    server.assert_idle()


def test_zmq_3_ten_thousand_ticks_for_a_client_that_does_not_read_become_one_message() -> None:
    queues = Queues({b"slow": 4, b"fast": 1})
    delivery = queues.delivery
    slow, fast = one_request(1, queues.open(b"slow").owner), one_request(1, queues.open(b"fast").owner)
    readers = {b"slow": StreamClient(), b"fast": StreamClient()}
    for reader in readers.values():
        reader.tokens[1] = []
    for step in range(10_000):
        delivery.deliver(iteration(step, slow, start=step == 0), 0.0)
        delivery.deliver(iteration(step, fast, slot=3, start=step == 0), 0.0)
        assert queues.read(b"fast", readers[b"fast"]) == 1, "the others get every tick at once"
    assert delivery.figures()["client_waiting_tokens"] < 11_000 and delivery.ticks_merged == 10_000 - 4
    assert queues.read(b"slow", readers[b"slow"]) == 4
    delivery.retry(0.0)
    assert queues.read(b"slow", readers[b"slow"]) == 0, "a full queue is not tried again at once"
    delivery.retry(1.0)
    assert queues.read(b"slow", readers[b"slow"]) == 1
    delivery.deliver(iteration(10_000, slow), 1.0)
    assert queues.read(b"slow", readers[b"slow"]) == 1 and not delivery.slow
    assert readers[b"slow"].tokens[1] == list(range(10_001))


def test_zmq_3_past_the_limit_of_tokens_a_client_is_cut_off_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_WAITING_TOKENS", 1000)
    queues = Queues({b"slow": 4})
    delivery = queues.delivery
    session = queues.open(b"slow")
    seq = one_request(1, session.owner)
    for step in range(2000):
        delivery.deliver(iteration(step, seq, start=step == 0), 0.0)
    ((doomed, why, reason),) = delivery.doomed
    assert doomed is session and why == "slow" and "1001 tokens" in reason and "1000" in reason
    assert delivery.figures()["clients_cut_slow_total"] == 1
    delivery.answer(session, b"x", 0.0)
    delivery.describe(session, "status", b"x", 0.0)
    delivery.retry(100.0)
    assert len(queues.frames[b"slow"]) == 4, "nothing more is sent to it"
    queues.sessions.close(session)
    delivery.forget(session)
    assert not delivery.slow and delivery.fanout.owned_by(session.owner) == {}


def test_past_the_limit_of_time_a_client_is_cut_off() -> None:
    queues = Queues({b"slow": 1})
    delivery = queues.delivery
    seq = one_request(1, queues.open(b"slow").owner)
    delivery.deliver(iteration(0, seq, start=True), 0.0)
    delivery.deliver(iteration(1, seq), 1.0)
    delivery.retry(1.0 + merging.UNREAD_S)
    assert not delivery.doomed
    delivery.retry(2.0 + merging.UNREAD_S)
    ((_, why, reason),) = delivery.doomed
    assert why == "slow" and "read nothing for 31 s" in reason


def test_one_message_read_starts_the_time_anew() -> None:
    queues = Queues({b"slow": 1})
    delivery = queues.delivery
    session = queues.open(b"slow")
    for n in range(4):
        delivery.answer(session, encode(Refused(n, "invalid", "", "")), 0.0)
    for round_ in range(3):
        queues.frames[b"slow"].popleft()
        delivery.retry(25.0 * (round_ + 1))
    assert not delivery.doomed and not delivery.slow


def test_zmq_3_a_client_that_vanishes_is_found_by_the_next_tick() -> None:
    queues = Queues({b"here": 1})
    session = queues.open(b"here")
    seq = one_request(1, session.owner)
    del queues.frames[b"here"]
    queues.delivery.deliver(iteration(0, seq, start=True), 0.0)
    queues.delivery.deliver(iteration(1, seq), 0.0)
    assert [(s, why) for s, why, _ in queues.delivery.doomed] == [(session, "gone")]
    assert queues.delivery.figures()["clients_gone_total"] == 1 and queues.woken == 1


def test_a_client_that_vanishes_while_it_is_slow_is_gone() -> None:
    queues = Queues({b"slow": 0})
    session = queues.open(b"slow")
    queues.delivery.answer(session, b"x", 0.0)
    del queues.frames[b"slow"]
    queues.delivery.retry(1.0)
    assert [why for _, why, _ in queues.delivery.doomed] == ["gone"]


def test_answers_are_all_kept_and_descriptions_are_replaced() -> None:
    queues = Queues({b"slow": 1})
    delivery = queues.delivery
    session = queues.open(b"slow")
    for n in range(5):
        delivery.answer(session, encode(Refused(n, "invalid", "", "")), 0.0)
        delivery.describe(session, "status", encode(StatusReply(n, 1, "m", True, False, {})), 0.0)
    got = []
    for round_ in range(10):
        got += [decode_to_client(frame) for frame in queues.frames[b"slow"]]
        queues.frames[b"slow"].clear()
        delivery.retry(float(round_))
    assert sorted(m.key for m in got if isinstance(m, Refused) and m.key is not None) == [0, 1, 2, 3, 4]
    assert [m.nonce for m in got if isinstance(m, StatusReply)] == [4] and not delivery.slow


def test_answers_that_nobody_reads_have_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merging, "MAX_WAITING_ANSWERS", 10)
    queues = Queues({b"slow": 1})
    session = queues.open(b"slow")
    for _ in range(13):
        queues.delivery.answer(session, b"x", 0.0)
    ((_, _, reason),) = queues.delivery.doomed
    assert "11 answers" in reason


def test_sec_1_answers_that_nobody_reads_have_a_limit_in_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client asks for long answers and does not read: it is cut off before they fill the memory."""
    monkeypatch.setattr(merging, "MAX_WAITING_BYTES", 1000)
    queues = Queues({b"slow": 1})
    session = queues.open(b"slow")
    for _ in range(8):
        queues.delivery.answer(session, bytes(200), 0.0)
    ((_, _, reason),) = queues.delivery.doomed
    assert reason == "1200 bytes of answers waited for it, at most 1000 may"


def test_the_end_of_a_slow_clients_requests_disturbs_nobody() -> None:
    """Its requests are ended by an event of their own, which comes after the tokens at hand."""
    server = shadow_server()
    queues = Queues({b"a": 1000})
    names = {1: b"a"}
    queues.open(b"gone"), queues.open(b"a")
    server.tell = lambda delivered: queues.delivery.deliver(delivered, 0.0)  # type: ignore[method-assign]
    server.submit(1, prompt(9), 50, owner=0)
    server.submit(1, prompt(9, 2), 50, owner=1)
    while not queues.delivery.doomed:
        advance(server, 1)
    ((session, _, _),) = queues.delivery.doomed
    queues.delivery.doomed.clear()
    queues.sessions.close(session)
    server.step(OwnerLost(session.owner))
    queues.delivery.forget(session)
    server.run()
    settle(server, queues, names)
    assert server.tokens(1, 1) == wanted(prompt(9, 2), 50)
    assert not server.engine.requests


# -- merging itself --------------------------------------------------------------------------------------------


def tick(sequence: int, rows: dict[int, int], starts: dict[int, int] | None = None, ends: list[End] | None = None,
         logprobs: list[TokenLogprobs] | None = None) -> Tick:  # fmt: skip
    bitmap = bytearray(max(rows, default=0) // 8 + 1)
    for slot in rows:
        bitmap[slot >> 3] |= 1 << (slot & 7)
    starts = starts or {}
    slots, keys = array("H", starts).tobytes(), array("Q", starts.values()).tobytes()
    ids = u32([rows[slot] for slot in sorted(rows)])
    return Tick(sequence, sequence, bytes(bitmap), False, ids, slots, keys, ends or [], 0, logprobs or [])


def flushed(waiting: Waiting) -> list[Merged]:
    frames: list[bytes] = []

    def send(frame: bytes) -> bool:
        frames.append(frame)
        return True

    assert waiting.flush(send, 1.0)
    messages = [decode_to_client(frame) for frame in frames]
    return [message for message in messages if isinstance(message, Merged)]


def test_a_slot_given_back_in_the_first_tick_still_has_its_token() -> None:
    first = tick(7, {1: 10, 2: 20}, ends=[End(5, 1, "stop", 3, 8, "")])
    waiting = Waiting(0.0, {(0, 2): 6}, first, 7)
    (merged,) = flushed(waiting)
    assert merged.sequence == 7 and waiting.sequence == 8
    assert {run.key: list(array("I", run.ids)) for run in merged.runs} == {5: [10], 6: [20]}
    assert merged.ends == [End(5, NO_SLOT, "stop", 3, 8)]
    assert [(o.replica, list(array("H", o.slots)), list(array("Q", o.keys))) for o in merged.owned] == [(0, [2], [6])]


def test_a_key_used_again_begins_a_message_of_its_own() -> None:
    waiting = Waiting(0.0, {}, tick(0, {1: 10}, {1: 5}, [End(5, 1, "length", 1)]), 0)
    waiting.hold(tick(1, {1: 30, 4: 40}, {1: 5, 4: 6}))
    waiting.hold(tick(2, {}, ends=[End(5, 1, "abort", 1)]))
    waiting.hold(tick(3, {}, ends=[End(5, NO_SLOT, "abort", 0)]))
    a, b, c = flushed(waiting)
    assert [m.sequence for m in (a, b, c)] == [0, 1, 2]
    assert [(r.key, r.ids) for r in a.runs] == [(5, u32([10]))]
    assert [(r.key, r.ids) for r in b.runs] == [(5, u32([30])), (6, u32([40]))]
    assert [end.reason for m in (a, b, c) for end in m.ends] == ["length", "abort", "abort"]


def test_logprobs_are_kept_and_counted() -> None:
    told = [TokenLogprobs(5, 4, b"\0\0\0\0", u32([1]), u32(range(20)), bytes(80))]
    waiting = Waiting(0.0, {(0, 1): 5}, tick(0, {1: 10}, logprobs=told), 0)
    assert waiting.tokens >= 1 + (4 + 4 + 80 + 80) / 4
    (merged,) = flushed(waiting)
    assert merged.logprobs == told and waiting.tokens == 0


def test_what_is_merged_while_some_of_it_was_sent_stays_in_order() -> None:
    waiting = Waiting(0.0, {}, tick(0, {1: 10}, {1: 5}, [End(5, 1, "length", 1)]), 0)
    waiting.hold(tick(1, {1: 11}, {1: 5}))
    sent: list[bytes] = []

    def send(frame: bytes) -> bool:
        if len(sent) == 1:
            return False
        sent.append(frame)
        return True

    assert not waiting.flush(send, 1.0) and waiting.sequence == 1
    waiting.hold(tick(2, {1: 12}))
    (rest,) = flushed(waiting)
    assert rest.sequence == 1 and rest.runs[0].ids == u32([11, 12])


def test_the_python_client_takes_ticks_and_merged_ones_by_turns() -> None:
    queues = Queues({b"c": 1})
    session = queues.open(b"c")
    state = ClientState()
    state.start(0.0)
    state.receive(Welcome(PROTOCOL_VERSION, 1, "m", True, 100, 100, 16, 100, 8, 8, (), session.secret), 0.0)
    request = state.submit(u32(prompt(4)), name="r", sampling=Sampling())
    seq = one_request(request.key, session.owner)
    for step in range(100):
        queues.delivery.deliver(iteration(step, seq, slot=2 + step // 40, start=step % 40 == 0), float(step))
        if step % 7 == 0:
            while queues.frames[b"c"]:
                state.receive(decode_to_client(queues.frames[b"c"].popleft()), 0.0)
            queues.delivery.retry(float(step))
        if step % 40 == 39:
            ended = [Ended(seq, 2 + step // 40, "paused")]
            queues.delivery.deliver(Delivered(0, step, b"", b"", -1, [], ended), float(step))
    while queues.frames[b"c"]:
        state.receive(decode_to_client(queues.frames[b"c"].popleft()), 0.0)
        queues.delivery.retry(1000.0)
    assert request.received.tolist() == list(range(100)) and state.connected
