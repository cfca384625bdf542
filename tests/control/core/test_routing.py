"""Which replica a request goes to: where the least is left to do for it and before it, cached blocks included."""

from collections import Counter

import pytest
from evenflow.control.core.events import ReplicaLost
from evenflow.control.wire import Sampling
from inprocess import InProcess
from shadow_server import prompt, scrambled, shadow_server, wanted


def homes(server: InProcess) -> dict[int, int]:
    """The replica of each unfinished request, by key."""
    found: dict[int, int] = {}
    for replica in server.engine.replicas.values():
        for seq in [*replica.running, *replica.waiting, *replica.settling]:
            found[seq.key] = replica.index
    return found


def placed(server: InProcess) -> list[int]:
    """How many unfinished requests each replica has."""
    counts = Counter(homes(server).values())
    return [counts[index] for index in sorted(server.engine.replicas)]


def sharing(first: list[int], key: int, size: int) -> list[int]:
    """A prompt that begins with ``first``."""
    return [*first, *prompt(size - len(first), seed=100 + key)]


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("size", [40, 200])
def test_replicas_fill_evenly_with_requests_that_share_their_first_block(replicas: int, size: int) -> None:
    server = shadow_server(replicas=replicas, blocks=1000, budget=256)
    first = prompt(16)
    server.submit(0, sharing(first, 0, size), 2)
    server.run()
    for key in range(1, 1 + 8 * replicas):
        server.submit(key, sharing(first, key, size), 40)
    assert placed(server) == [8] * replicas
    server.run(scrambled(7))
    for key in range(1, 1 + 8 * replicas):
        assert server.tokens(key) == wanted(sharing(first, key, size), 40)
    server.assert_idle()


def test_a_long_cached_prefix_attracts_past_a_few_running_requests() -> None:
    server = shadow_server(replicas=2, blocks=1000, budget=256)
    first = prompt(800)
    server.submit(0, first, 2)
    server.run()
    # Something else runs where the prefix is, nothing where it is not.
    for key in (1, 2, 3):
        server.submit(key, sharing(first, key, 830), 60)
        assert homes(server)[key] == 0
        server.walk(key, 30)
    server.run()
    assert all(server.clients[0].cached[key] == 800 for key in (1, 2, 3))


def test_a_loaded_replica_does_not_attract_by_a_short_prefix() -> None:
    server = shadow_server(replicas=2, blocks=1000, budget=256)
    server.submit(0, prompt(48), 2)
    server.run()
    for key in range(1, 5):
        server.submit(key, sharing(prompt(32), key, 60), 40)
    assert placed(server) == [2, 2]


def test_an_idle_replica_is_used_rather_than_one_that_owes_much_prompt() -> None:
    """Also if that is a single request, and the other replica has more of them."""
    server = shadow_server(replicas=2, blocks=1000, budget=16, max_model_len=4096)
    server.submit(0, prompt(1000, seed=1), 4)
    for key in range(1, 6):
        server.submit(key, prompt(20, seed=1 + key), 4)
    assert homes(server) == {0: 0, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1}


def test_a_prompt_that_is_cached_where_it_waits_is_not_counted_as_owed() -> None:
    """Turns of one conversation: many tokens wait, of which few are to be computed."""
    server = shadow_server(replicas=2, blocks=1000, budget=256)
    first = prompt(800)
    server.submit(0, first, 2)
    server.run()
    for key in range(1, 7):
        server.submit(key, sharing(first, key, 820), 4)
    assert set(homes(server).values()) == {0}


def test_where_log_probabilities_of_the_prompt_are_wanted_the_cache_attracts_nobody() -> None:
    server = shadow_server(replicas=2, blocks=1000, budget=256)
    first = prompt(400)
    server.submit(0, first, 2)
    server.run()
    server.submit(1, prompt(20, seed=2), 40)
    server.submit(2, first, 40, sampling=Sampling(prompt_logprobs=0))
    assert homes(server) == {1: 0, 2: 1}


def test_what_is_alike_goes_to_the_first_replica() -> None:
    server = shadow_server(replicas=3, blocks=1000, budget=256)
    for key in range(6):
        server.submit(key, prompt(30, seed=key), 40)
    assert homes(server) == {0: 0, 1: 1, 2: 2, 3: 0, 4: 1, 5: 2}


def test_of_those_that_are_alike_the_first_is_the_one_with_the_lowest_number() -> None:
    """Whichever came up first: a replica that was away is the last to be back."""
    server = shadow_server(replicas=3, blocks=1000, budget=256)
    server.crash(0)
    server.bring_up(0)
    server.submit(0, prompt(30), 40)
    assert homes(server) == {0: 0}


def test_what_a_lost_replica_had_is_spread_over_the_others_by_its_work() -> None:
    server = shadow_server(replicas=3, blocks=1000, budget=16, seqs=16)
    for key in range(12):
        server.submit(key, prompt(60, seed=key), 40)
    assert placed(server) == [4, 4, 4]
    server.step(ReplicaLost(1))
    assert placed(server) == [6, 6]
