"""A sequence's tokens depend on nothing but itself: equal over token budgets, block sizes, stages, batch mates,
prefix cache and preemption. All cells with shadow-KV workers, whose ids follow from what they read through the block
table; ``wanted`` knows the ids from the tokens alone.
"""

import pytest
from shadow_server import only, prompt, scrambled, shadow_server, wanted

BUDGETS = (1, 7, 16, 17, 64, 250, 1000, 4096)
BLOCK_SIZES = (8, 16, 32)
STAGES = (1, 2, 3)


def probe_size(budget: int, block_size: int) -> int:
    """Long enough that chunks end inside blocks and blocks inside chunks, short enough for the budget; three tokens
    short of a block's end."""
    blocks = {1: 1, 7: 3, 16: 4, 17: 5, 64: 9}.get(budget)
    return 1021 if blocks is None else blocks * block_size - 3


def companions(probe: list[int], budget: int, block_size: int, count: int) -> list[tuple[list[int], int]]:
    """Prompts that end around a block's end and soon need another block; some share a prefix with the probe that
    ends inside a block."""
    found: list[tuple[list[int], int]] = []
    for i in range(count):
        size = block_size - 1 + i // 2 % 3
        # With a budget of 1 prompts are read one after the other: only long outputs meet.
        output = 12 if budget > 1 else block_size * 3 // 2 if i < 2 else 3
        shared = block_size + 1 if i > 2 and i % 2 else 0
        found.append((probe[:shared] + prompt(size, seed=50 + i), output))
    return found


@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize("budget", BUDGETS)
def test_tokens_are_equal_in_every_cell(budget: int, stages: int) -> None:
    cells = 0
    for block_size in BLOCK_SIZES:
        probe, output = prompt(probe_size(budget, block_size)), 12
        for alone in (True, False):
            requests = companions(probe, budget, block_size, 0 if alone else 7)
            requests.insert(0 if budget > 1 else len(requests), (probe, output))
            most = max(-(-(len(tokens) + count) // block_size) for tokens, count in requests)
            # Three blocks beside the first prompt: two more are admitted, and soon each of them needs another.
            scarce = max(most, -(-len(requests[0][0]) // block_size) + 3)
            for caching in (True, False):
                for tiny in (False, True):
                    server = shadow_server(
                        budget=budget,
                        block_size=block_size,
                        blocks=scarce if tiny else 256,
                        stages=stages,
                        seqs=16,
                        caching=caching,
                        check=False,
                    )
                    for key, (tokens, count) in enumerate(requests):
                        server.submit(key, tokens, count)
                    server.run(scrambled(budget + block_size))
                    cell = f"block size {block_size}, {len(requests)} requests, cache {caching}, tiny {tiny}"
                    for key, (tokens, count) in enumerate(requests):
                        assert server.tokens(key) == wanted(tokens, count), cell
                    server.assert_idle()
                    # Where only one sequence may run at a time, nobody is there to take blocks from.
                    preempted = only(server).preemptions > 0
                    assert preempted == (tiny and not alone and budget * stages > 1), cell
                    cells += 1
    print(f"budget {budget}, {stages} stages: {cells} cells")


@pytest.mark.parametrize("budget", [7, 16, 17, 64])
def test_a_prompt_of_1001_tokens_among_others(budget: int) -> None:
    """The small budgets once more with a long prompt, which shares the iterations with decodes."""
    server = shadow_server(budget=budget, block_size=16, blocks=160, stages=2, seqs=16, check=False)
    probe = prompt(1001)
    requests = companions(probe, budget, 16, 7)
    requests.insert(2, (probe, 20))
    for key, (tokens, count) in enumerate(requests):
        server.submit(key, tokens, count)
    server.run(scrambled(budget))
    for key, (tokens, count) in enumerate(requests):
        assert server.tokens(key) == wanted(tokens, count)
    server.assert_idle()


def test_the_cells_are_all_there() -> None:
    print("cells:", len(BUDGETS) * len(BLOCK_SIZES) * len(STAGES) * 2 * 2 * 2)
    assert len(BUDGETS) * len(BLOCK_SIZES) * len(STAGES) * 2 * 2 * 2 == 576
