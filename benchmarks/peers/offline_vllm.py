"""vLLM's engine without its HTTP server (see ``talk``): every request of a batch runs in each of its own steps.

Run, in its environment: python benchmarks/peers/offline_vllm.py DIRECTORY DTYPE THREADS
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from itertools import count

import talk


def load(
    directory: str, dtype: str, threads: int
) -> tuple[Callable[[list[int]], float], Callable[[list[list[int]], int], list[float]]]:
    # The engine in this process, and on the same cores as the others: by default it leaves one to its front end.
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = f"0-{threads - 1}"
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = "2"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    engine = LLM(directory, dtype=dtype, max_model_len=8192, enable_prefix_caching=False, max_num_seqs=64).llm_engine
    keys = count(1)

    def submit(prompt: list[int], output: int) -> None:
        wanted = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False)
        engine.add_request(str(next(keys)), TokensPrompt(prompt_token_ids=prompt), wanted)

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        submit(prompt, 1)
        while engine.has_unfinished_requests():
            engine.step()
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        for prompt in prompts:
            submit(prompt, steps + 4 + len(prompts) * len(prompt) // 512)
        seconds: list[float] = []
        known: dict[str, int] = {}
        while engine.has_unfinished_requests():
            began = time.perf_counter()
            outputs = engine.step()
            took = time.perf_counter() - began
            decoded = sum(known.get(output.request_id, 0) > 0 for output in outputs)
            known.update((output.request_id, len(output.outputs[0].token_ids)) for output in outputs)
            if decoded == len(prompts) and len(seconds) < steps:
                seconds.append(took)
        return seconds

    prefill(talk.prompts(1, 600, 0)[0])
    return prefill, decode


if __name__ == "__main__":
    talk.serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
