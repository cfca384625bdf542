"""``InProcess`` servers over real runners on one thread, for tests of equality: the runners are built once, and their
KV memory is filled with NaN before each server."""

from functools import lru_cache

from evenflow.control.core.bounds import iteration_tokens
from evenflow.control.core.events import Limits
from evenflow.dataplane.model_runner import ModelRunner
from evenflow.dataplane.weights import open_model
from evenflow.dataplane.weights.random import RandomSource
from inprocess import InProcess


@lru_cache(maxsize=4)
def runners(model: str, stages: int, block_size: int, dtype: str = "float32") -> list[ModelRunner]:
    """The stages of ``random`` (four layers, 512 ids) or of a packaged model."""
    source = RandomSource() if model == "random" else open_model(model)
    memory = (1 << 22) if model == "random" else (160 << 20)
    return [
        ModelRunner(
            source,
            stage,
            stages,
            dtype=dtype,
            block_size=block_size,
            kv_memory=memory // stages,
            poison=True,
        )
        for stage in range(stages)
    ]


def real_server(
    model: str,
    *,
    budget: int,
    block_size: int,
    stages: int,
    caching: bool,
    blocks: int | None = None,
    seqs: int = 16,
    dtype: str = "float32",
    policy: str = "stall-free",
) -> InProcess:
    """A server on runners that earlier cells used, with NaN wherever they wrote."""
    own = runners(model, stages, block_size, dtype)
    for runner in own:
        runner.poison()
    limits = Limits(
        token_budget=iteration_tokens(policy, budget, 1200, seqs),
        max_num_seqs=seqs,
        max_model_len=1200,
        policy=policy,
        block_size=block_size,
        prefix_caching=caching,
    )
    return InProcess(
        limits, lambda stage, _: own[stage], stages=stages, num_slots=3 * seqs, num_blocks=blocks, check=False
    )
