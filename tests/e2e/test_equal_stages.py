"""One cell of the equality grid per number of stages, through real processes: SmolLM2 behind real sockets, links and
gateway-free clients gives the tokens that the model alone gives, computed whole in this process."""

import asyncio
from functools import cache
from random import Random

import pytest
from evenflow.control.client import AsyncClient, Stream
from evenflow.control.core.events import Limits
from evenflow.dataplane.model_runner import load_runner
from inprocess import InProcess
from live_server import PATIENCE, live

pytestmark = pytest.mark.xdist_group("smollm2")

MODEL = "smollm2-135m"
NEW = 8


@cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Eight prompts, two of which share a beginning that ends inside a block."""
    draw = Random(17)
    made = [tuple(draw.randrange(49_152) for _ in range(size)) for size in (150, 1, 16, 33, 70, 7, 31)]
    return (*made, made[0][:41] + made[4][:20])


@cache
def expected(dtype: str) -> tuple[tuple[int, ...], ...]:
    runner = load_runner(MODEL, dtype=dtype, kv_memory=64 << 20, threads=1)
    found: list[tuple[int, ...]] = []
    for tokens in prompts():
        limits = Limits(token_budget=4096, max_model_len=512, prefix_caching=False)
        alone = InProcess(limits, lambda _stage, _count: runner, check=False)
        alone.submit(0, list(tokens), NEW)
        alone.run()
        found.append(tuple(alone.tokens(0)))
    return tuple(found)


@pytest.mark.parametrize(
    ("stages", "budget", "block_size", "dtype"),
    [(1, 17, 32, "float32"), (2, 64, 8, "float32"), (3, 250, 16, "float32"), (2, 64, 16, "int8")],
)
def test_real_processes_give_the_tokens_of_the_model_alone(
    stages: int, budget: int, block_size: int, dtype: str
) -> None:
    options = ("--stages", str(stages), "--token-budget", str(budget), "--block-size", str(block_size))
    # Another test may run on the other core: a second thread would wait for it again and again.
    with live(MODEL, "--dtype", dtype, "--threads", "1", *options) as server:

        async def ask() -> list[tuple[int, ...]]:
            async with AsyncClient(server.endpoint) as client:
                await client.wait_connected(PATIENCE)
                streams: list[Stream] = [await client.submit(tokens, max_tokens=NEW) for tokens in prompts()]
                return [tuple([token async for chunk in stream for token in chunk.ids]) for stream in streams]

        assert tuple(asyncio.run(ask())) == expected(dtype)
