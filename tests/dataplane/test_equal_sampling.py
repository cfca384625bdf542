"""Determinism of all that sampling can be asked for: tokens, log-probabilities and their alternatives are the same to
the last bit for any token budget, block size, number of stages, batch mates, prefix cache and preemption.

Pairwise cells with a random model in float32 and bfloat16, and some in int8 and int4; what is expected was computed
alone, whole, without a cache. ``test_equal_tokens`` has the whole grid for greedy requests.
"""

from array import array
from functools import cache
from random import Random

import pytest
from evenflow.control.wire import Sampling
from evenflow.dataplane.simulated.made_up import Row
from real_server import real_server

NEW = 10


def biased(**fields: object) -> Sampling:
    """Some ids favoured, some all but ruled out."""
    ids = range(0, 512, 7)
    values = [(-100.0, 2.5, 1.25)[i % 3] for i in range(len(ids))]
    return Sampling(bias_ids=array("I", ids).tobytes(), bias_values=array("f", values).tobytes(), **fields)


#: Each with ids that end it and its minimum of tokens. Every request of a cell has one of these, in turn.
KINDS = [
    (Sampling(0.9, seed=11, repetition=1.3, presence=0.4, frequency=0.3, logprobs=4), (), 0),
    (Sampling(logprobs=0, prompt_logprobs=3), (), 0),
    (biased(temperature=1.4, top_p=0.9, min_p=0.02, seed=2**64 - 1), tuple(range(0, 512, 8)), 5),
    (biased(repetition=0.8, logprobs=20), tuple(range(100, 164)), 8),
    (Sampling(1.0, top_k=30, seed=5, index=3, frequency=-1.5, prompt_logprobs=0), (), 0),
    (Sampling(), tuple(range(3, 512, 8)), 7),
    (Sampling(2.0, min_p=0.1, seed=6, repetition=2.0, logprobs=1), (), 0),
    (Sampling(0.7, seed=7), (), 0),
]

#: Budget, block size, stages, mates, cache, scarce blocks, type: each two values of two of them meet.
CELLS = [
    (1, 8, 1, 0, True, False, "float32"),
    (1, 16, 3, 0, False, True, "bfloat16"),
    (7, 16, 2, 7, False, True, "float32"),
    (17, 32, 3, 7, True, False, "bfloat16"),
    (64, 8, 2, 7, True, True, "bfloat16"),
    (64, 16, 3, 0, False, False, "float32"),
    (250, 32, 1, 7, False, True, "bfloat16"),
    (17, 8, 3, 7, False, True, "float32"),
    (4096, 16, 1, 7, True, True, "float32"),
    (7, 32, 3, 0, True, True, "bfloat16"),
    (250, 16, 2, 0, True, False, "float32"),
    (4096, 32, 2, 7, False, False, "bfloat16"),
    (7, 16, 2, 7, False, True, "int8"),
    (64, 32, 3, 7, True, False, "int8"),
    (17, 8, 3, 7, True, True, "int4"),
    (250, 16, 1, 7, False, False, "int4"),
]

Request = tuple[tuple[int, ...], int]
Answer = tuple[list[int], dict[int, Row]]


@cache
def alone(tokens: tuple[int, ...], kind: int, dtype: str) -> Answer:
    single = real_server("random", budget=4096, block_size=16, stages=1, caching=False, dtype=dtype)
    sampling, stop_ids, min_tokens = KINDS[kind]
    single.submit(0, list(tokens), NEW, sampling=sampling, stop_ids=stop_ids, min_tokens=min_tokens)
    single.run()
    return single.tokens(0), single.logprobs_of(0)


def requests_for(block_size: int, mates: int) -> list[Request]:
    """The first is alone if it has no mates; some share a prefix with it that ends inside a block."""
    draw = Random(block_size)
    probe = tuple(draw.randrange(512) for _ in range(5 * block_size - 3))
    found: list[Request] = [(probe, block_size % 5)]
    for i in range(mates):
        own = tuple(draw.randrange(512) for _ in range(block_size - 1 + i % 3))
        found.append(((probe[: 2 * block_size + 1] if i % 2 else ()) + own, (block_size + i) % len(KINDS)))
    return found


@pytest.mark.parametrize(("budget", "block_size", "stages", "mates", "caching", "tight", "dtype"), CELLS)
def test_cells(budget: int, block_size: int, stages: int, mates: int, caching: bool, tight: bool, dtype: str) -> None:
    requests = requests_for(block_size, mates)
    most = max(-(-(len(tokens) + NEW) // block_size) for tokens, _ in requests)
    cell = real_server(
        "random",
        budget=budget,
        block_size=block_size,
        stages=stages,
        caching=caching,
        blocks=most + 1 if tight else None,
        dtype=dtype,
    )
    for key, (tokens, kind) in enumerate(requests):
        sampling, stop_ids, min_tokens = KINDS[kind]
        cell.submit(key, list(tokens), NEW, sampling=sampling, stop_ids=stop_ids, min_tokens=min_tokens)
    cell.run(Random(budget).randrange)
    cell.assert_idle()
    for key, (tokens, kind) in enumerate(requests):
        expected, logprobs = alone(tokens, kind, dtype)
        assert cell.tokens(key) == expected, (key, kind)
        assert cell.logprobs_of(key) == logprobs, (key, kind)
    assert cell.engine.replicas[0].preemptions or not (tight and mates)


def test_the_requests_show_what_they_ask_for() -> None:
    """Else the cells would prove nothing: each kind does what it is for."""
    prompt = requests_for(16, 0)[0][0]
    answers = [alone(prompt, kind, "float32") for kind in range(len(KINDS))]
    for (sampling, stop_ids, min_tokens), (tokens, logprobs) in zip(KINDS, answers, strict=True):
        places = [*range(1, len(prompt))] if sampling.prompt_logprobs >= 0 else []
        places += range(len(prompt), len(prompt) + len(tokens)) if sampling.logprobs >= 0 else []
        assert sorted(logprobs) == places
        for place, (value, rank, top) in logprobs.items():
            assert len(top) == (sampling.logprobs if place >= len(prompt) else sampling.prompt_logprobs)
            known = [*prompt, *tokens]
            if rank <= len(top):
                assert top[rank - 1] == (known[place], value)
        # The first stop id ends it, and there is none before the minimum.
        stops = [place for place, token in enumerate(tokens, 1) if token in stop_ids]
        assert stops in ([], [len(tokens)]) and (not stops or len(tokens) >= min_tokens)
        assert len(tokens) == NEW or stops
    assert len({tuple(tokens) for tokens, _ in answers}) == len(KINDS)
    assert all(alone(prompt, kind, "float32")[0] != answers[5][0] for kind in (0, 2, 3, 4, 6, 7))
    # Some of those that sample were stopped, at or after their minimum.
    assert any(len(tokens) < NEW for tokens, _ in answers)
