"""From the core's deliveries to each client's ticks: only its own tokens, in the order of ownership."""

from array import array

from evenflow.control.core.events import Delivered, Ended, OwnerLost
from evenflow.control.core.sequence import Sequence
from evenflow.control.fanout import Fanout
from evenflow.control.wire import NO_SLOT, Submit, Tick, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from inprocess import StreamClient, u32
from shadow_server import advance, only, prompt, shadow_server, wanted


def sequence(owner: int, key: int, output: int = 0) -> Sequence:
    seq = Sequence(key, owner, Submit(key, f"r{key}", u32(prompt(4)), 4), 100)
    seq.tokens += u32([7] * output)
    return seq


def bitmap(*slots: int) -> bytes:
    bits = bytearray(max(slots, default=-1) // 8 + 1)
    for slot in slots:
        bits[slot >> 3] |= 1 << (slot & 7)
    return bytes(bits)


def test_one_clients_iteration_passes_as_it_came() -> None:
    fanout = Fanout()
    seq = sequence(3, 9)
    ids = u32([0, 0, 55])
    ((owner, first),) = fanout.ticks(Delivered(0, 4, bitmap(2), ids, 3, [(2, seq)]))
    assert owner == 3 and first.dense and first.ids is ids
    assert list(array("H", first.start_slots)) == [2] and list(array("Q", first.start_keys)) == [9]
    ((_, second),) = fanout.ticks(Delivered(0, 5, bitmap(2), ids, 3))
    assert (first.sequence, second.sequence, second.step) == (0, 1, 5)
    assert second.dense and not second.start_slots and second.ends == []


def test_several_clients_get_only_their_rows() -> None:
    fanout = Fanout()
    a, b, c = sequence(0, 10), sequence(1, 10), sequence(0, 11)
    ids = u32([100, 101, 102, 103, 104, 105, 106, 107, 108, 109])
    starts = [(0, a), (4, b), (9, c)]
    ticks = dict(fanout.ticks(Delivered(0, 1, bitmap(0, 4, 9), ids, -1, starts)))
    assert set(ticks) == {0, 1} and not ticks[0].dense and not ticks[1].dense
    assert list(array("I", ticks[0].ids)) == [100, 109] and ticks[0].live == bitmap(0, 9)
    assert list(array("I", ticks[1].ids)) == [104] and ticks[1].live == bitmap(4)
    assert list(array("H", ticks[1].start_slots)) == [4] and list(array("Q", ticks[0].start_keys)) == [10, 11]


def test_void_rows_are_left_out_and_their_client_hears_nothing() -> None:
    fanout = Fanout()
    a, b = sequence(0, 1), sequence(1, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0, 1), u32([5, 6]), -1, [(0, a), (1, b)]))
    ticks = fanout.ticks(Delivered(0, 2, bitmap(1), u32([5, 6]), -1))
    assert [owner for owner, _ in ticks] == [1] and list(array("I", ticks[0][1].ids)) == [6]


def test_an_iteration_of_void_rows_only_is_not_sent() -> None:
    fanout = Fanout()
    assert fanout.ticks(Delivered(0, 1, bytearray(2), u32([5, 6]), 3)) == []
    assert not fanout.clients, "nothing is kept of a client that may be gone"


def test_an_end_follows_the_token_and_frees_the_slot() -> None:
    fanout = Fanout()
    a, b = sequence(0, 1, output=1), sequence(0, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0), u32([5]), 0, [(0, a)]))
    a.tokens += u32([6])
    ((_, tick),) = fanout.ticks(Delivered(0, 2, bitmap(0), u32([6]), 0, [], [Ended(a, 0, "stop")]))
    (end,) = tick.ends
    assert tick.live == bitmap(0) and (end.key, end.slot, end.reason, end.output_tokens) == (1, 0, "stop", 2)
    ((_, tick),) = fanout.ticks(Delivered(0, 3, bitmap(0), u32([7]), 0, [(0, b)]))
    client = StreamClient()
    client.sequence, client.tokens[2] = tick.sequence, []
    client.take(tick)
    assert client.tokens[2] == [7]


def test_the_end_of_another_clients_request_splits_a_dense_iteration() -> None:
    fanout = Fanout()
    a, b = sequence(0, 1), sequence(1, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0, 1), u32([5, 6]), -1, [(0, a), (1, b)]))
    ticks = dict(fanout.ticks(Delivered(0, 2, bitmap(0), u32([7]), 0, [], [Ended(b, 1, "abort")])))
    assert list(array("I", ticks[0].ids)) == [7] and ticks[0].ends == []
    assert ticks[1].ids == b"" and ticks[1].ends[0].reason == "abort" and ticks[1].ends[0].slot == 1


def test_paused_is_told_only_to_who_owned_a_slot() -> None:
    fanout = Fanout()
    owner, waiting = sequence(0, 1, output=1), sequence(0, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0), u32([5]), 0, [(0, owner)]))
    ended = [Ended(owner, 0, "paused"), Ended(waiting, 1, "paused")]
    ((_, tick),) = fanout.ticks(Delivered(0, 2, b"", b"", -1, [], ended))
    assert [(end.key, end.slot, end.reason) for end in tick.ends] == [(1, 0, "paused")]
    assert fanout.ticks(Delivered(0, 2, b"", b"", -1, [], [Ended(waiting, 1, "paused")])) == []


def test_a_request_that_owned_nothing_ends_without_a_slot() -> None:
    fanout = Fanout()
    ((_, tick),) = fanout.ticks(Delivered(-1, 0, b"", b"", 0, [], [Ended(sequence(0, 4), -1, "abort")]))
    assert tick.ends[0].slot == NO_SLOT and tick.replica == 0


def test_equal_slots_of_two_replicas_are_different() -> None:
    fanout = Fanout()
    a, b = sequence(0, 1), sequence(1, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0), u32([5]), -1, [(0, a)]))
    fanout.ticks(Delivered(1, 1, bitmap(0), u32([6]), -1, [(0, b)]))
    ((owner, tick),) = fanout.ticks(Delivered(1, 2, bitmap(0), u32([8]), -1))
    assert owner == 1 and tick.replica == 1
    fanout.ticks(Delivered(1, 3, b"", b"", -1, [], [Ended(b, 0, "abort")]))
    ((owner, tick),) = fanout.ticks(Delivered(0, 2, bitmap(0), u32([9]), -1))
    assert owner == 0 and list(array("I", tick.ids)) == [9]


def test_sequence_numbers_are_each_clients_own() -> None:
    fanout = Fanout()
    a, b = sequence(0, 1), sequence(1, 2)
    fanout.ticks(Delivered(0, 1, bitmap(0, 1), u32([5, 6]), -1, [(0, a), (1, b)]))
    seen: dict[int, list[int]] = {0: [], 1: []}
    for live in (bitmap(0), bitmap(1), bitmap(1), bitmap(0, 1)):
        for owner, tick in fanout.ticks(Delivered(0, 2, live, u32([5, 6]), -1)):
            seen[owner].append(tick.sequence)
    assert seen == {0: [1, 2], 1: [1, 2, 3]}


def test_a_forgotten_client_leaves_nothing() -> None:
    server = shadow_server(stages=2)
    for key in range(6):
        server.submit(key, prompt(8, seed=key), 30, owner=key % 2)
    advance(server, 60)

    assert server.fanout.owned_by(0) and server.fanout.owned_by(1)
    server.step(OwnerLost(1))
    server.fanout.forget(1)
    late = server.clients.pop(1)
    got = {key: list(tokens) for key, tokens in late.tokens.items()}

    def refuse(tick: Tick) -> None:
        raise AssertionError("a tick for a client that is gone")

    server.clients[1] = StreamClient()
    server.clients[1].take = refuse  # type: ignore[method-assign]
    server.run()
    del server.clients[1]
    assert not server.fanout.owned_by(0) and not server.fanout.owned_by(1) and server.fanout.clients == [0]
    for key in range(0, 6, 2):
        assert server.tokens(key) == wanted(prompt(8, seed=key), 30)
    for key, tokens in got.items():
        assert tokens == wanted(prompt(8, seed=key), 30)[: len(tokens)]
    server.assert_idle()


def test_a_preempted_request_keeps_its_stream_over_two_slots() -> None:
    server = shadow_server(blocks=8, block_size=8, caching=False)
    paused: list[int] = []
    starts: dict[int, int] = {}
    for key in range(3):
        server.submit(key, prompt(15, seed=key), 30)
    take = server.clients[0].take

    def watch(tick: Tick) -> None:
        paused.extend(end.key for end in tick.ends if end.reason == "paused")
        for key in array("Q", tick.start_keys):
            starts[key] = starts.get(key, 0) + 1
        take(tick)

    server.clients[0].take = watch  # type: ignore[method-assign]
    server.run()
    assert only(server).preemptions and paused
    for key in range(3):
        assert starts[key] == 1 + paused.count(key)
        assert server.tokens(key) == wanted(prompt(15, seed=key), 30)
    server.assert_idle()


@settings(deadline=None)
@given(st.data())
def test_a_frame_is_what_encoding_the_tick_gives(data: st.DataObject) -> None:
    """Whatever the slots, the clients' numbers, the steps and the sequence numbers are."""
    plain, direct = Fanout(), Fanout()
    slots = data.draw(st.lists(st.integers(0, 3000), min_size=1, max_size=12, unique=True).map(sorted), "slots")
    owners = data.draw(st.lists(st.integers(0, 5), min_size=len(slots), max_size=len(slots)), "owners")
    replica = data.draw(st.sampled_from([0, 1, 127, 128, 255, 256, 65_535]), "replica")
    rows = [(slot, sequence(owner, slot)) for slot, owner in zip(slots, owners, strict=True)]
    ids = u32([(slot * 2_654_435_761) & 0xFFFFFFFF for slot in range(slots[-1] + 1)])
    began = Delivered(replica, 0, bitmap(*slots), ids, -1, rows)
    assert direct.frames(began) == [(owner, encode(tick)) for owner, tick in plain.ticks(began)]
    owned = dict(rows)
    for _ in range(6):
        number = data.draw(st.sampled_from([0, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1, 2**32]), "number")
        for owner in set(owners):
            plain.renumber(owner, number)
            direct.renumber(owner, number)
        step = data.draw(st.sampled_from([1, 127, 128, 255, 256, 65_535, 65_536, 2**32 - 1]), "step")
        live = data.draw(st.lists(st.sampled_from(slots), min_size=0, unique=True), "live")
        # Some slots change hands, with the old owner's end in an iteration before, some owners just end.
        begin = data.draw(st.lists(st.sampled_from(slots), max_size=2, unique=True), "begin")
        starts = [(slot, sequence(data.draw(st.integers(0, 5)), slot)) for slot in begin if slot not in owned]
        owned |= dict(starts)
        alive = [slot for slot in live if slot in owned] + [slot for slot, _ in starts if slot not in live]
        ending = data.draw(st.lists(st.sampled_from(slots), max_size=3, unique=True), "end")
        ends = [Ended(owned.pop(slot), slot, "length") for slot in ending if slot in owned]
        delivered = Delivered(replica, step, bitmap(*alive), ids, -1, starts, ends)
        assert direct.frames(delivered) == [(owner, encode(tick)) for owner, tick in plain.ticks(delivered)]
        assert direct.owned_by(0) == plain.owned_by(0)
