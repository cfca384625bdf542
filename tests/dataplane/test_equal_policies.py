"""A sequence's tokens are the same under every policy: on real tensors, with NaN in every block that was not written.

Requests come while others run, so that decodes pause for prompts, prompts wait for batches, and some are preempted.
What is expected was computed alone.
"""

from functools import cache
from random import Random

import pytest
from evenflow.control.core.bounds import POLICIES
from inprocess import InProcess
from real_server import real_server

BLOCK_SIZE = 16


@cache
def alone(model: str, tokens: tuple[int, ...], count: int) -> list[int]:
    """What an undisturbed run gives."""
    single = real_server(model, budget=1200, block_size=BLOCK_SIZE, stages=1, caching=False)
    single.submit(0, list(tokens), count)
    single.run()
    return single.tokens(0)


@cache
def requests_for(vocabulary: int, count: int) -> list[tuple[tuple[int, ...], int]]:
    """Prompts and how many tokens are wanted; some prompts share a prefix that ends inside a block."""
    draw = Random(7)
    shared = tuple(draw.randrange(vocabulary) for _ in range(40))
    found: list[tuple[tuple[int, ...], int]] = []
    for key in range(count):
        own = tuple(draw.randrange(vocabulary) for _ in range(draw.randrange(1, 70)))
        found.append(((shared if key % 3 == 0 else ()) + own, draw.randrange(2, 30)))
    return found


def run(model: str, vocabulary: int, policy: str, stages: int, *, requests: int, blocks: int | None) -> InProcess:
    """Let ``requests`` requests come one after the other, and compare each."""
    wanted = requests_for(vocabulary, requests)
    # Before the server is made, since it may have the same runners.
    expected = [alone(model, tokens, count) for tokens, count in wanted]
    server = real_server(
        model,
        budget=24,
        block_size=BLOCK_SIZE,
        stages=stages,
        caching=stages != 2,
        blocks=blocks,
        seqs=6,
        policy=policy,
    )
    draw = Random(stages)
    for key, (tokens, count) in enumerate(wanted):
        server.submit(key, list(tokens), count)
        for _ in range(draw.randrange(12)):
            actions = server.actions()
            if actions:
                action, replica, stage = actions[draw.randrange(len(actions))]
                action(replica, stage)
    server.run(draw.randrange)
    server.assert_idle()
    for key, tokens in enumerate(expected):
        assert server.tokens(key) == tokens, f"request {key}"
    return server


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_model_on_one_stage_with_too_few_blocks(policy: str) -> None:
    server = run("random", 512, policy, 1, requests=7, blocks=9)
    assert server.engine.replicas[0].preemptions > 0 or policy in ("hybrid", "request-level")


@pytest.mark.parametrize("policy", POLICIES)
def test_a_random_model_on_three_stages(policy: str) -> None:
    server = run("random", 512, policy, 3, requests=8, blocks=None)
    mixed = any(sent.decodes and sent.tokens > sent.decodes for sent in server.plans)
    assert mixed == (policy in ("stall-free", "hybrid", "hybrid-only"))


@pytest.mark.parametrize("policy", ["prefill-first", "hybrid"])
def test_smollm2_on_two_stages(policy: str) -> None:
    run("smollm2-135m", 49_152, policy, 2, requests=2, blocks=None)
