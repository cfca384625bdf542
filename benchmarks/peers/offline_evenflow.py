"""evenflow without sockets: the decision core and a stage's executor in one process (see ``talk``).

Run: python benchmarks/peers/offline_evenflow.py DTYPE THREADS
"""

from __future__ import annotations

import sys
import time
from array import array
from collections.abc import Callable
from itertools import count

import talk
from evenflow.control.core.engine import Engine
from evenflow.control.core.events import Limits, ReplicaUp, Returned, SendPlan, Submitted
from evenflow.control.wire import Start, Submit, encode
from evenflow.dataplane.executor import StageExecutor
from evenflow.dataplane.model_runner import load_runner
from weights import MODEL

#: As large as a chunk of the product's own on an idle server.
BUDGET, SEQUENCES = 2048, 64


def load(
    dtype: str, threads: int
) -> tuple[Callable[[list[int]], float], Callable[[list[list[int]], int], list[float]]]:
    runner = load_runner(MODEL, 0, 1, dtype=dtype, block_size=16, kv_memory=2 << 30, threads=threads)
    executor = StageExecutor(runner, 0, 1)
    info = runner.info
    engine = Engine(Limits(BUDGET, SEQUENCES, info.max_model_len, prefix_caching=False))
    executor.start(Start(1, 1, info.num_blocks, 16, SEQUENCES, BUDGET, info.max_model_len, ""))
    waiting: list[SendPlan] = []
    keys = count(1)

    def take(event: ReplicaUp | Submitted | Returned) -> None:
        for effect in engine.step(event, 0.0):
            if isinstance(effect, SendPlan):
                executor.accept([encode(m) for m in [*effect.registers, effect.plan]], 0)
                waiting.append(effect)

    def iterate() -> SendPlan:
        outcome = executor.execute(None)
        if outcome.sampled is not None and not executor.first:
            executor.take_ids(outcome.sampled)
        plan = waiting.pop(0)
        take(Returned(0, outcome.result(0, 0, 0, 0)))
        return plan

    def submit(prompt: list[int], output: int) -> None:
        key = next(keys)
        take(Submitted(0, Submit(key, f"r{key}", array("I", prompt).tobytes(), len(prompt), output)))

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        submit(prompt, 1)
        while waiting:
            iterate()
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        # Those that are read first go on decoding until the last has been read.
        for prompt in prompts:
            submit(prompt, steps + 4 + len(prompts) * len(prompt) // (BUDGET // 4))
        seconds: list[float] = []
        while waiting:
            began = time.perf_counter()
            plan = iterate()
            if plan.decodes == len(prompts) == plan.tokens and len(seconds) < steps:
                seconds.append(time.perf_counter() - began)
        return seconds

    take(ReplicaUp(0, 1, 1, info.num_blocks, SEQUENCES))
    prefill(talk.prompts(1, 600, 0)[0])
    return prefill, decode


if __name__ == "__main__":
    talk.serve(lambda: load(sys.argv[1], int(sys.argv[2])))
