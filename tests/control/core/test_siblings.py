"""Requests of one prompt (n > 1): they share its full blocks wherever it is, and never wait for ever."""

import pytest
from evenflow.control.core.events import OwnerLost
from evenflow.control.core.sequence import Phase
from evenflow.control.wire import Sampling
from inprocess import InProcess
from shadow_server import advance, only, prompt, scrambled, shadow_server, wanted


def submit_family(server: InProcess, tokens: list[int], count: int, output: int = 6, first: int = 0) -> None:
    for key in range(first, first + count):
        server.submit(key, tokens, output, leader=None if key == first else first)


def parked(server: InProcess) -> list[int]:
    return [seq.key for followers in server.engine.parked.values() for seq in followers]


@pytest.mark.parametrize("stages", [1, 3])
@pytest.mark.parametrize("budget", [16, 64, 256])
def test_siblings_share_the_prompts_full_blocks(budget: int, stages: int) -> None:
    server = shadow_server(budget=budget, stages=stages)
    tokens = prompt(100)
    submit_family(server, tokens, 4)
    # Where the whole prompt is planned by now, nobody has to wait.
    assert parked(server) == ([1, 2, 3] if budget == 16 else [])
    server.run(scrambled(budget))
    for key in range(4):
        assert server.tokens(key) == wanted(tokens, 6)
        assert server.clients[0].cached[key] == (96 if key else 0)
    assert only(server).cache_hits == 3 * 96
    server.assert_idle()


def test_siblings_hold_the_prompts_blocks_once() -> None:
    """Seven blocks of prompt and one of output each: four requests fit into a pool that holds two without sharing."""
    server = shadow_server(blocks=16, budget=64)
    tokens = prompt(112)
    submit_family(server, tokens, 4, output=12)
    server.run()
    assert not only(server).preemptions
    for key in range(4):
        assert server.tokens(key) == wanted(tokens, 12)


def test_nothing_is_parked_where_nothing_can_be_shared() -> None:
    for size, caching, sampling in [(16, True, None), (40, False, None), (40, True, Sampling(prompt_logprobs=0))]:
        server = shadow_server(caching=caching)
        server.submit(0, prompt(size), 4)
        server.submit(1, prompt(size), 4, leader=0, sampling=sampling)
        assert not parked(server)
        server.run()
        assert server.tokens(1) == wanted(prompt(size), 4)


@pytest.mark.parametrize("leader", [7, 1])
def test_an_unknown_leader_and_oneself_are_ignored(leader: int) -> None:
    server = shadow_server()
    server.submit(1, prompt(40), 4, leader=leader)
    assert not parked(server)
    server.run()
    assert server.tokens(1) == wanted(prompt(40), 4)


def test_a_leader_with_another_prompt_salt_or_client_is_ignored() -> None:
    server = shadow_server()
    server.submit(0, prompt(40), 4)
    server.submit(1, prompt(40, seed=2), 4, leader=0)
    server.submit(2, prompt(40), 4, leader=0, salt=b"other")
    server.submit(3, prompt(40), 4, leader=0, owner=1)
    assert not parked(server)
    server.run()


def test_a_refused_leader_leaves_its_siblings_alone() -> None:
    server = shadow_server(max_model_len=64)
    server.submit(0, prompt(80), 4)
    assert server.rejected
    server.submit(1, prompt(40), 4, leader=0)
    server.run()
    assert server.tokens(1) == wanted(prompt(40), 4)


@pytest.mark.parametrize("steps", [0, 2, 5])
def test_the_leader_is_aborted(steps: int) -> None:
    """While it waits, while its prompt is read, and when nothing else would wake the core."""
    server = shadow_server(budget=16)
    tokens = prompt(100)
    submit_family(server, tokens, 3)
    advance(server, steps)
    server.abort(0)
    assert not parked(server)
    server.run()
    for key in (1, 2):
        assert server.tokens(key) == wanted(tokens, 6)
    server.assert_idle()


def test_a_follower_is_aborted_while_it_is_parked() -> None:
    server = shadow_server(budget=16)
    submit_family(server, prompt(100), 3)
    server.abort(1)
    assert parked(server) == [2] and server.reason(1) == "abort"
    server.run()
    assert server.tokens(2) == wanted(prompt(100), 6)
    server.assert_idle()


def test_their_client_is_lost() -> None:
    server = shadow_server(budget=16)
    submit_family(server, prompt(100), 3)
    advance(server, 2)
    server.step(OwnerLost(0))
    assert not server.engine.requests and not server.engine.parked
    server.run()
    server.assert_idle()


def test_the_leader_is_preempted_while_its_prompt_is_read() -> None:
    server = shadow_server(budget=16, blocks=15)
    for key in range(10, 14):
        server.submit(key, prompt(8, seed=key), 20)
    tokens = prompt(150, seed=2)
    submit_family(server, tokens, 3, first=1)
    while only(server).preemptions == 0:
        assert server.actions()
        advance(server, 1)
    leader = server.engine.requests[0][1]
    assert leader.phase in (Phase.SETTLING, Phase.WAITING) and parked(server) == [2, 3]
    server.run()
    for key in range(10, 14):
        assert server.tokens(key) == wanted(prompt(8, seed=key), 20)
    for key in (1, 2, 3):
        assert server.tokens(key) == wanted(tokens, 6)
    server.assert_idle()


@pytest.mark.parametrize("steps", [0, 3, 12])
def test_the_leaders_replica_is_lost(steps: int) -> None:
    server = shadow_server(budget=16, replicas=2)
    tokens = prompt(100)
    submit_family(server, tokens, 4)
    advance(server, steps)
    server.crash(0)
    server.run()
    server.bring_up(0)
    server.run()
    for key in range(4):
        assert server.tokens(key) == wanted(tokens, 6)
    server.assert_idle()


def test_without_any_replica_they_wait_and_then_share() -> None:
    server = shadow_server(budget=16, up=False)
    submit_family(server, prompt(100), 3)
    server.abort(2)
    server.bring_up(0)
    server.run()
    assert server.tokens(1) == wanted(prompt(100), 6) and server.clients[0].cached[1] == 96
    server.assert_idle()


def test_siblings_go_where_their_leader_is() -> None:
    server = shadow_server(budget=64, replicas=2)
    # The second replica has less to do when the siblings come.
    server.submit(0, prompt(20), 50)
    server.submit(1, prompt(400, seed=2), 30)
    server.submit(2, prompt(20, seed=3), 50)
    for key in range(3, 7):
        server.submit(key, prompt(400, seed=2), 30, leader=1)
    server.run()
    home = next(sent.replica for sent in server.plans for r in sent.registers if r.prompt_len == 400)
    assert all(sent.replica == home for sent in server.plans for r in sent.registers if r.prompt_len == 400)
    assert [server.clients[0].cached[key] for key in range(3, 7)] == [384] * 4


def test_parked_siblings_do_not_hold_up_those_behind_them() -> None:
    server = shadow_server(budget=64, overtakes=0)
    submit_family(server, prompt(2000), 3)
    server.submit(9, prompt(5, seed=9), 2)
    while server.reason(9) is None:
        advance(server, 1)
    assert parked(server) == [1, 2] and server.tokens(9) == wanted(prompt(5, seed=9), 2)
    assert not any(seq.passed for seq in server.engine.requests[0].values())
    server.run()
    server.assert_idle()


def test_parked_siblings_count_as_waiting() -> None:
    server = shadow_server(budget=16, max_queued=3)
    submit_family(server, prompt(300), 6)
    assert [(refused.key, refused.code) for refused in server.rejected] == [(4, "overloaded"), (5, "overloaded")]


def test_a_continued_family_shares_its_prompt_again() -> None:
    """As after a restart of the control process: each with the tokens it had received."""
    server = shadow_server(budget=16)
    tokens = prompt(100)
    for key in range(3):
        server.submit(key, tokens, 6, received=wanted(tokens, key), leader=0 if key else None)
    assert parked(server) == [1, 2]
    server.run()
    for key in range(3):
        assert server.tokens(key) == wanted(tokens, 6)
    assert [server.clients[0].cached[key] for key in (1, 2)] == [96, 96]
