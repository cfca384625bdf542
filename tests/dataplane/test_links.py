"""Links between stages of one host: the shared ring, its bells, and the ids that go back."""

import os
import select
import time

import numpy as np
import pytest
from evenflow.control.wire import Start
from evenflow.dataplane.executor import SampledIds
from evenflow.dataplane.links import HiddenRing, LinkBroken, StageLinks, decode_ids, encode_ids

BUDGET = 8
WIDTH = 6


def start(directory, stages: int = 3, epoch: int = 4) -> Start:
    return Start(
        epoch=epoch,
        stages=stages,
        num_blocks=8,
        block_size=16,
        num_slots=8,
        token_budget=BUDGET,
        max_model_len=64,
        links=str(directory),
    )


@pytest.fixture
def chain(tmp_path):
    """The links of three stages, in one process."""
    links = [StageLinks(start(tmp_path), stage, WIDTH) for stage in range(3)]
    yield links
    for link in links:
        link.close()


def arrive(link: StageLinks) -> None:
    assert link.inbound is not None
    assert select.select([link.inbound], [], [], 5.0)[0]
    link.drain()


def states(step: int, tokens: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 256, (tokens, WIDTH), np.uint8)


def test_hidden_states_go_around_the_ring_more_than_once(chain):
    sender, receiver = chain[1], chain[2]
    for step in range(17):
        sent = states(step, 1 + step % BUDGET)
        sender.send_hidden(step, sent)
        arrive(receiver)
        assert receiver.has_hidden(step)
        assert (receiver.hidden() == sent).all()
        receiver.finish_hidden()
        assert not receiver.has_hidden(step)


def test_inputs_are_looked_for_without_sleeping(chain):
    sender, receiver = chain[1], chain[2]
    began = time.monotonic()
    assert not receiver.spin(2_000)
    assert time.monotonic() - began >= 0.002
    sender.send_hidden(0, states(0, 2))
    assert receiver.spin(60_000_000)
    assert not receiver.has_hidden(0), "looking takes nothing in"
    receiver.drain()
    assert receiver.has_hidden(0)
    assert not receiver.spin(0)


def test_five_batches_may_be_under_way_and_are_not_overwritten(chain):
    sender, receiver = chain[0], chain[1]
    for step in range(5):
        sender.send_hidden(step, states(step, BUDGET))
    with pytest.raises(LinkBroken, match="5 batches unread"):
        sender.send_hidden(5, states(5, BUDGET))
    for step in range(5):
        while not receiver.has_hidden(step):
            arrive(receiver)
        assert (receiver.hidden() == states(step, BUDGET)).all()
        receiver.finish_hidden()
    sender.send_hidden(5, states(5, 1))


def test_hidden_states_of_another_step_break_the_link(chain):
    chain[0].send_hidden(3, states(3, 2))
    arrive(chain[1])
    with pytest.raises(LinkBroken, match="step 3 came, 2 is next"):
        chain[1].has_hidden(2)


def test_ids_go_from_the_last_stage_to_the_first(chain):
    for step in range(3):
        chain[2].send_ids(SampledIds(step, np.array([1, 65535]), np.array([7, 2**32 - 1]), np.array([0, 2**32 - 1])))
    got = []
    while len(got) < 3:
        arrive(chain[0])
        while (sampled := chain[0].take_ids()) is not None:
            got.append(sampled)
    assert [sampled.step for sampled in got] == [0, 1, 2]
    assert got[2].slots.tolist() == [1, 65535]
    assert got[2].generations.tolist() == [7, 2**32 - 1]
    assert got[2].ids.tolist() == [0, 2**32 - 1]


def test_files_are_gone_when_nobody_needs_their_names(chain, tmp_path):
    rings = sorted(path.name for path in tmp_path.glob("*.ring"))
    assert rings == ["e4-1.ring", "e4-2.ring"]
    chain[0].send_hidden(0, states(0, 1))
    assert sorted(path.name for path in tmp_path.glob("*.ring")) == ["e4-2.ring"]
    chain[2].close()
    assert not list(tmp_path.glob("*.ring"))
    chain[2].close()
    assert chain[2].inbound is None


def test_epochs_do_not_meet(chain, tmp_path):
    chain[0].send_hidden(0, states(0, 1))
    later = [StageLinks(start(tmp_path, epoch=5), stage, WIDTH) for stage in range(3)]
    later[0].send_hidden(0, states(9, 2))
    arrive(later[1])
    assert (later[1].hidden() == states(9, 2)).all()
    for link in later:
        link.close()


def test_one_stage_has_no_links():
    link = StageLinks(start("", stages=1), 0, WIDTH)
    assert link.inbound is None
    link.drain()
    assert not link.has_hidden(None)
    link.close()


def test_a_next_stage_that_is_not_there_is_named(tmp_path):
    link = StageLinks(start(tmp_path), 0, WIDTH)
    with pytest.raises(LinkBroken, match="next stage has not started"):
        link.send_hidden(0, states(0, 1))
    link.close()
    with pytest.raises(FileNotFoundError):
        StageLinks(start(tmp_path / "missing"), 1, WIDTH)


def test_a_ring_of_another_size_is_refused(tmp_path):
    path = tmp_path / "ring"
    ring = HiddenRing(path, 4, BUDGET, WIDTH, create=True)
    with pytest.raises(LinkBroken, match="bytes"):
        HiddenRing(path, 5, BUDGET, WIDTH, create=False)
    with pytest.raises(FileExistsError):
        HiddenRing(path, 4, BUDGET, WIDTH, create=True)
    for index, tokens in ((4, 1), (0, 0), (0, BUDGET + 1)):
        with pytest.raises(LinkBroken):
            ring.entry(index, tokens)
    held = ring.entry(0, 2)
    held[:] = 7
    ring.close()
    assert held.tolist() == [[7] * WIDTH] * 2, "memory lives as long as a view of it"


def test_ids_that_are_cut_off_break_the_link():
    frame = encode_ids(SampledIds(1, np.array([1, 2]), np.array([1, 1]), np.array([3, 4])))
    assert decode_ids(frame).ids.tolist() == [3, 4]
    for size in (0, 7, len(frame) - 1):
        with pytest.raises(LinkBroken):
            decode_ids(frame[:size])
    with pytest.raises(LinkBroken):
        decode_ids(frame + b"\0")


def test_ids_that_come_in_pieces_are_put_together(chain):
    """A pipe keeps the order of bytes, not the bounds of messages."""
    messages = [SampledIds(step, np.arange(5), np.full(5, 2), np.arange(5) + 7 * step) for step in range(3)]
    stream = b"".join(encode_ids(message) for message in messages)
    taken = []
    for at in range(0, len(stream), 11):
        assert os.write(chain[0].inbound, stream[at : at + 11])
        chain[0].drain()
        while (sampled := chain[0].take_ids()) is not None:
            taken.append(sampled)
    assert [sampled.step for sampled in taken] == [0, 1, 2]
    for sampled, message in zip(taken, messages, strict=True):
        assert (sampled.ids == message.ids).all()


def test_a_next_stage_that_died_is_left_to_control(chain):
    chain[0].send_hidden(0, states(0, 1))
    os.close(chain[1]._inlet.descriptor)
    chain[1]._inlet = None
    chain[0].send_hidden(1, states(1, 1))
