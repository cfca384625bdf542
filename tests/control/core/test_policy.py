"""What goes into an iteration under the stall-free policy."""

from array import array

import pytest
from evenflow.control.core.events import SendPlan
from inprocess import InProcess
from shadow_server import advance, only, prompt, shadow_server


def chunks(sent: SendPlan) -> dict[int, int]:
    """Tokens by slot."""
    plan = sent.plan
    return dict(zip(array("H", plan.chunk_slots), array("I", plan.chunk_tokens), strict=True))


def with_decodes(count: int, **options: int | float) -> InProcess:
    """A server in which ``count`` sequences decode, at rest but for them."""
    server = shadow_server(**options)  # pyright: ignore[reportArgumentType]
    for key in range(count):
        server.submit(key, prompt(4, seed=key), 1000)
    while only(server).lanes[0].count < count:
        advance(server, 1)
    return server


@pytest.mark.parametrize("decodes", [0, 1, 9, 40])
@pytest.mark.parametrize(("budget", "tile"), [(64, 16), (70, 16), (256, 64), (250, 64)])
def test_the_batch_total_is_a_multiple_of_the_tile(budget: int, tile: int, decodes: int) -> None:
    server = with_decodes(decodes, budget=budget, tile=tile)
    before = len(server.plans)
    server.submit(99, prompt(1000, seed=99), 2)
    for _ in range(40):
        advance(server, 1)
    read = 0
    for sent in server.plans[before:]:
        read += sum(chunks(sent).values())
        assert sent.tokens <= budget
        if chunks(sent) and read < 1000:
            assert sent.tokens == budget // tile * tile and sent.decodes == decodes
    assert read > 200


def test_a_chunk_that_would_become_zero_is_not_cut() -> None:
    server = with_decodes(14, budget=18, tile=16, seqs=20)
    before = len(server.plans)
    server.submit(99, prompt(40, seed=99), 2)
    advance(server, 12)
    assert [sent.tokens for sent in server.plans[before:] if chunks(sent)][:2] == [16, 16]
    server = with_decodes(16, budget=18, tile=16, seqs=20)
    before = len(server.plans)
    server.submit(99, prompt(40, seed=99), 2)
    advance(server, 12)
    assert [sent.tokens for sent in server.plans[before:] if chunks(sent)][:2] == [18, 18]


def test_the_last_chunk_of_a_prompt_is_not_cut() -> None:
    server = shadow_server(budget=64, tile=16)
    server.submit(0, prompt(70), 2)
    server.run()
    assert [sent.tokens for sent in server.plans if chunks(sent)] == [64, 6]


@pytest.mark.parametrize(("share", "fresh"), [(0.25, 16), (0.5, 32), (0.1, 7)])
def test_the_share_goes_to_the_next_request(share: float, fresh: int) -> None:
    server = shadow_server(budget=64, share=share, up=False)
    server.submit(0, prompt(300), 2)
    server.bring_up(0)
    server.submit(1, prompt(300, seed=1), 2)
    advance(server, 4)
    assert chunks(server.plans[0]) == {0: 64}
    first = next(sent for sent in server.plans if 1 in chunks(sent))
    assert chunks(first) == {0: 64 - fresh, 1: fresh}


def test_share_0_is_algorithm_3() -> None:
    """Prefills in progress first, oldest first; a new one only with what they leave."""
    server = shadow_server(budget=64, share=0.0, up=False)
    for key, size in enumerate([100, 100, 30]):
        server.submit(key, prompt(size, seed=key), 2)
    server.bring_up(0)
    server.run()
    assert [chunks(sent) for sent in server.plans if chunks(sent)] == [
        {0: 64},
        {0: 36, 1: 28},
        {1: 63},  # beside the first's decode
        {1: 9, 2: 30},
    ]
    order = [slot for sent in server.plans for slot in chunks(sent)]
    assert order == sorted(order), "nobody is passed"


def test_what_the_share_does_not_use_goes_back() -> None:
    server = shadow_server(budget=64, share=0.5, up=False)
    server.submit(0, prompt(300), 2)
    server.submit(1, prompt(5, seed=1), 2)
    server.bring_up(0)
    first = next(sent for sent in server.plans if 1 in chunks(sent))
    assert chunks(first) == {0: 59, 1: 5}


def test_one_token_left_goes_to_the_prefill_in_progress() -> None:
    """However many wait, and whatever the share."""
    server = shadow_server(budget=2, share=1.0, seqs=4, stages=2)
    for key in range(2):
        server.submit(key, prompt(4, seed=key), 200)
    while [lane.count for lane in only(server).lanes] != [1, 1]:
        advance(server, 1)
    before = len(server.plans)
    for key in range(2, 4):
        server.submit(key, prompt(20, seed=key), 2)
    while len(only(server).running) < 4:
        advance(server, 1)
    sizes = [n for sent in server.plans[before:] for n in chunks(sent).values()]
    order = [slot for sent in server.plans[before:] for slot in chunks(sent)]
    assert set(sizes) == {1} and order == [2] * 20 + [3], "the first is read without a pause"


def test_every_decode_of_the_lane_is_in_every_batch() -> None:
    server = with_decodes(10, budget=32)
    before = len(server.plans)
    server.submit(99, prompt(500, seed=99), 2)
    advance(server, 60)
    for sent in server.plans[before:]:
        assert sent.decodes >= 10 and sent.tokens <= 32


def test_no_more_decode_than_the_budget_and_the_rest_waits() -> None:
    server = shadow_server(budget=4, seqs=16)
    for key in range(10):
        server.submit(key, prompt(2, seed=key), 30)
    assert only(server).max_running == 4
    most = 0
    while server.actions():
        advance(server, 1)
        most = max(most, len(only(server).running))
    assert most == 4
    server.assert_idle()


def test_the_sequence_limit_holds() -> None:
    server = shadow_server(budget=64, seqs=3)
    for key in range(10):
        server.submit(key, prompt(2, seed=key), 5)
    while server.actions():
        assert len(only(server).running) <= 3
        advance(server, 1)
    server.assert_idle()


def test_a_full_queue_refuses_new_requests_but_not_continuations() -> None:
    server = shadow_server(seqs=1, max_queued=2)
    for key in range(4):
        server.submit(key, prompt(4, seed=key), 3)
    (refused,) = server.rejected
    # Of four that came a second apart, one has left the queue: so the next one may in four seconds.
    assert (refused.key, refused.code, refused.retry_after_ms) == (3, "overloaded", 4000)
    del server.clients[0].tokens[3]
    server.submit(4, prompt(4, seed=4), 3, received=[1])
    assert len(server.rejected) == 1
