"""Issue of determinism on real tensors: a sequence's tokens are the same for any token budget, block size, number of
stages, batch mates, prefix cache and preemption.

All cells with a random model of four layers, in one process over loopback links, KV memory filled with NaN before
each; pairwise cells with SmolLM2, with weights of few bits too. What is expected was computed alone,
whole, without a cache.
"""

from functools import cache
from itertools import product
from random import Random

import pytest
from real_server import real_server

BUDGETS = (1, 7, 16, 17, 64, 250, 1000, 4096)
BLOCK_SIZES = (8, 16, 32)
STAGES = (1, 2, 3)
NEW = 6


@cache
def alone(model: str, tokens: tuple[int, ...], count: int, dtype: str) -> list[int]:
    """What an undisturbed run gives."""
    single = real_server(model, budget=4096, block_size=16, stages=1, caching=False, dtype=dtype)
    single.submit(0, list(tokens), count)
    single.run()
    return single.tokens(0)


def run_cell(
    model: str,
    requests: list[tuple[tuple[int, ...], int]],
    *,
    budget: int,
    block_size: int,
    stages: int,
    caching: bool,
    blocks: int | None = None,
    dtype: str = "float32",
) -> int:
    """Run the requests together and compare each; returns the number of preemptions."""
    cell = real_server(
        model, budget=budget, block_size=block_size, stages=stages, caching=caching, blocks=blocks, dtype=dtype
    )
    draw = Random(budget * 31 + block_size)
    for key, (tokens, count) in enumerate(requests):
        cell.submit(key, list(tokens), count)
    cell.run(draw.randrange)
    cell.assert_idle()
    for key, (tokens, count) in enumerate(requests):
        wanted = alone(model, tokens, count, dtype)
        assert cell.tokens(key) == wanted, f"request {key}: {budget=} {block_size=} {stages=}"
    return cell.engine.replicas[0].preemptions


def requests_for(
    vocabulary: int, budget: int, size: int, block_size: int, mates: int
) -> list[tuple[tuple[int, ...], int]]:
    """A probe, and others that end around a block's end; some share a prefix with it that ends inside a block."""
    draw = Random(size)
    probe = tuple(draw.randrange(vocabulary) for _ in range(size))
    found = [(probe, NEW)]
    for i in range(mates):
        # With a budget of 1 prompts are read one token after the other: only the first two meet for long.
        brief = budget == 1 and i > 1
        own = tuple(draw.randrange(vocabulary) for _ in range(1 + i % 3 if brief else block_size - 1 + i % 3))
        shared = probe[: block_size + 1] if i % 2 and not brief else ()
        output = 2 if brief else block_size * 3 // 2 if budget == 1 else 12
        found.append((shared + own, output))
    return found


def probe_size(budget: int, block_size: int) -> int:
    """Long enough that chunks end inside blocks and blocks inside chunks; three short of a block's end."""
    blocks = {1: 1, 7: 3, 16: 4, 17: 5, 64: 9, 250: 20}.get(budget)
    return 1021 if blocks is None else blocks * block_size - 3


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_every_cell_of_a_random_model(budget: int, stages: int) -> None:
    """SCH-3, with NaN in every block that was not written."""
    cells = preempted = 0
    for block_size in BLOCK_SIZES:
        for mates in (0, 7):
            requests = requests_for(512, budget, probe_size(budget, block_size), block_size, mates)
            most = max(-(-(len(tokens) + count) // block_size) for tokens, count in requests)
            scarce = max(most, -(-len(requests[0][0]) // block_size) + 3)
            for caching, blocks in product((True, False), (None, scarce)):
                preempted += run_cell(
                    "random",
                    requests,
                    budget=budget,
                    block_size=block_size,
                    stages=stages,
                    caching=caching,
                    blocks=blocks,
                )
                cells += 1
    # With a budget of 1 on one stage a single sequence runs at a time, and nobody can be preempted.
    assert preempted or budget * stages == 1
    print(f"budget {budget}, {stages} stages: {cells} cells, {preempted} preemptions")


#: Twelve cells in which each two values of budget, block size, stages, mates, cache and scarcity meet; then some with
#: weights of few bits.
SMOLLM2_CELLS = [
    (1, 8, 1, 0, True, False, "float32"),
    (7, 16, 2, 7, False, True, "float32"),
    (16, 32, 3, 7, True, False, "float32"),
    (17, 8, 2, 7, True, True, "float32"),
    (64, 16, 3, 0, False, False, "float32"),
    (250, 32, 1, 7, False, True, "float32"),
    (1000, 8, 3, 7, False, True, "float32"),
    (4096, 16, 1, 7, True, True, "float32"),
    (7, 32, 1, 0, True, True, "float32"),
    (64, 8, 2, 7, True, True, "float32"),
    (250, 16, 2, 0, True, False, "float32"),
    (4096, 32, 3, 0, False, False, "float32"),
    (17, 16, 2, 7, True, True, "int8"),
    (250, 8, 3, 7, False, True, "int8"),
    (64, 32, 2, 7, True, False, "int4"),
    (1000, 16, 1, 7, False, True, "int4"),
]


@pytest.mark.parametrize(("budget", "block_size", "stages", "mates", "caching", "tight", "dtype"), SMOLLM2_CELLS)
def test_cells_of_smollm2(
    budget: int, block_size: int, stages: int, mates: int, caching: bool, tight: bool, dtype: str
) -> None:
    size = min(probe_size(budget, block_size), 300)
    requests = requests_for(49_152, budget, size, block_size, mates)
    most = max(-(-(len(tokens) + count) // block_size) for tokens, count in requests)
    scarce = max(most, -(-size // block_size) + 3) if tight else None
    preempted = run_cell(
        "smollm2-135m",
        requests,
        budget=budget,
        block_size=block_size,
        stages=stages,
        caching=caching,
        blocks=scarce,
        dtype=dtype,
    )
    assert preempted or not (tight and mates)
