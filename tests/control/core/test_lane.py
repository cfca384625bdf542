"""Lanes: the ring of sampled ids, growth buckets, the calendar of ends."""

from array import array

import pytest
from evenflow.control.core.lane import RING_TICKS, Lane
from evenflow.control.core.sequence import Sequence
from evenflow.control.wire import Submit
from inprocess import u32
from shadow_server import advance, only, prompt, scrambled, shadow_server, wanted


def sequence(slot: int, known: int, max_len: int, owner: int = 0) -> Sequence:
    seq = Sequence(slot, owner, Submit(slot, "r", u32([1] * known), known), max_len)
    seq.slot = slot
    return seq


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_sequence_longer_than_the_ring_gets_exactly_its_tokens(stages: int) -> None:
    server = shadow_server(stages=stages, check=False)
    lengths = {0: 1300, 1: RING_TICKS - 9, 2: RING_TICKS - 8, 3: RING_TICKS + 1, 4: 700}
    for key, length in lengths.items():
        server.submit(key, prompt(3 + key, seed=key), length)
        advance(server, 7)
    server.run(scrambled(stages))
    for key, length in lengths.items():
        assert server.tokens(key) == wanted(prompt(3 + key, seed=key), length)
    server.assert_idle()


def test_what_core_keeps_of_a_long_sequence_are_its_tokens_too() -> None:
    """The client gets ids from each result; recovery and prefix names use the core's own copy."""
    server = shadow_server(check=False)
    server.submit(0, prompt(5), 1300)
    while len(server.tokens(0)) < 1200:
        advance(server, 1)
    seq = server.engine.requests[0][0]
    assert 0 < seq.known - 5 < 1200, "the ring has wrapped, its last part is not collected"
    server.crash(0)
    assert list(array("I", seq.tokens)) == prompt(5) + server.tokens(0)
    server.bring_up(0)
    server.run()
    assert server.tokens(0) == wanted(prompt(5), 1300)
    # Generated tokens are named: a prompt that repeats them hits them.
    server.submit(1, prompt(5) + server.tokens(0), 2)
    server.run()
    assert server.clients[0].cached[1] >= 1304 // 16 * 16 - 16
    server.assert_idle()


def test_columns_across_the_wrap_of_the_ring() -> None:
    lane = Lane(0, 8, 16)
    lane.tick = lane.done = RING_TICKS - 3
    seq = sequence(5, 4, 1000)
    lane.join(seq, 4)
    for i in range(6):
        lane.tick += 1
        lane.store(u32([0, 0, 0, 0, 0, 100 + i]))
    lane.gather(seq)
    assert list(array("I", seq.tokens))[4:] == [100, 101, 102, 103, 104, 105]
    lane.gather(seq)
    assert seq.known == 10, "a column is collected once"


@pytest.mark.parametrize("known", [1, 15, 16, 17, 31, 32])
def test_blocks_are_granted_at_the_tick_that_needs_them(known: int) -> None:
    lane = Lane(0, 8, 16)
    lane.tick = 5
    seq = sequence(3, known, 200)
    seq.table = list(range(-(-(known - 1) // 16)))  # blocks of what is computed when it joins
    lane.join(seq, known)
    for _ in range(40):
        # The tick writes the position of the newest known token.
        position = known - 1 + lane.tick - 5
        grows = 3 in lane.grow[lane.tick % 16]
        assert grows == (position % 16 == 0)
        if grows:
            lane.grow[lane.tick % 16][3].append(0)
        assert position < 16 * len(seq.table)
        lane.tick += 1


def test_the_calendar_holds_the_tick_of_the_last_token() -> None:
    lane = Lane(0, 8, 16)
    lane.tick = 7
    seq = sequence(2, 10, 15)
    lane.join(seq, 11)  # four more: ticks 7, 8, 9, 10
    assert seq.end_tick == 10 and lane.ends == {10: {2: seq}}
    lane.leave(seq)
    assert not lane.ends and not any(lane.grow) and not lane.collect and not lane.owners
    assert not any(lane.bitmap) and lane.count == lane.kv_tokens == 0


def test_sums_follow_joins_ticks_and_leaves() -> None:
    lane = Lane(0, 64, 16)
    members = [sequence(slot, 10 * (slot + 1), 1000, owner=slot % 2) for slot in range(5)]
    for i, seq in enumerate(members):
        lane.join(seq, seq.known)
        lane.tick += i
    expected = sum(seq.join_known + lane.tick - seq.join_tick for seq in members)
    assert lane.kv_tokens == expected and lane.count == 5 and lane.owners == {0: 3, 1: 2}
    lane.done = lane.tick
    lane.leave(members[4])
    assert lane.kv_tokens == expected - (members[4].join_known + lane.tick - members[4].join_tick)
    assert lane.owners == {0: 2, 1: 2} and lane.highest_slot() == 3


@pytest.mark.parametrize("slots", [[0], [7], [8], [0, 63], [15, 16]])
def test_highest_slot(slots: list[int]) -> None:
    lane = Lane(0, 64, 16)
    for slot in slots:
        lane.join(sequence(slot, 4, 100), 4)
    assert lane.highest_slot() == max(slots)


def test_moving_between_lanes_keeps_the_order_of_tokens() -> None:
    """Requests that end at different times leave lanes uneven: others move, with results in flight."""
    server = shadow_server(stages=3, seqs=24)
    lengths = [3 + 17 * key % 40 for key in range(20)]
    for key, length in enumerate(lengths):
        server.submit(key, prompt(4, seed=key), length)
    lanes: dict[int, set[int]] = {}
    choose = scrambled(8)
    while actions := server.actions():
        action, replica, stage = actions[choose(len(actions))]
        action(replica, stage)
        for seq in only(server).running:
            if seq.lane is not None:
                lanes.setdefault(seq.key, set()).add(seq.lane.index)
    assert any(len(visited) > 1 for visited in lanes.values())
    for key, length in enumerate(lengths):
        assert server.tokens(key) == wanted(prompt(4, seed=key), length)
    server.assert_idle()
