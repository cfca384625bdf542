"""OpenVINO GenAI's continuous batching in process (see ``talk``): it has no HTTP server in its wheel.

Run, in its environment: python benchmarks/peers/offline_openvino.py GGUF THREADS [TOKENS_OF_AN_ITERATION]
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from itertools import count

import numpy as np
import openvino as ov
import openvino_genai as genai
import talk


def load(
    file: str, threads: int, tokens: int = 4096
) -> tuple[Callable[[list[int]], float], Callable[[list[list[int]], int], list[float]]]:
    scheduling = genai.SchedulerConfig()
    scheduling.max_num_batched_tokens = tokens
    scheduling.max_num_seqs = 64
    scheduling.cache_size = 2
    scheduling.enable_prefix_caching = False
    scheduling.dynamic_split_fuse = True
    engine = genai.ContinuousBatchingPipeline(file, scheduling, "CPU", {"INFERENCE_NUM_THREADS": threads}, {}, {})
    keys = count(1)

    def submit(prompt: list[int], output: int):
        wanted = genai.GenerationConfig()
        wanted.max_new_tokens, wanted.ignore_eos, wanted.do_sample = output, True, False
        return engine.add_request(next(keys), ov.Tensor(np.array([prompt], dtype=np.int64)), wanted)

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        handle = submit(prompt, 1)
        # A new request counts as unfinished only from the next step on.
        while handle.get_status() == genai.GenerationStatus.RUNNING:
            engine.step()
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        handles = [submit(p, steps + 4 + len(prompts) * len(p) // (tokens // 4)) for p in prompts]
        seconds: list[float] = []
        known = [0] * len(handles)
        while any(handle.get_status() == genai.GenerationStatus.RUNNING for handle in handles):
            began = time.perf_counter()
            engine.step()
            took = time.perf_counter() - began
            new = [sum(len(o.generated_ids) for o in h.read().values()) if h.can_read() else 0 for h in handles]
            if all(new) and all(known) and len(seconds) < steps:
                seconds.append(took)
            known = [before + now for before, now in zip(known, new, strict=True)]
        return seconds

    prefill(talk.prompts(1, 600, 0)[0])
    return prefill, decode


if __name__ == "__main__":
    talk.serve(lambda: load(sys.argv[1], *map(int, sys.argv[2:])))
