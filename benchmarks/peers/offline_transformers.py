"""transformers' model with its own cache and torch's attention (see ``talk``).

Run: python benchmarks/peers/offline_transformers.py DIRECTORY DTYPE THREADS
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import talk
import torch
from transformers import AutoModelForCausalLM


def load(
    directory: str, dtype: str, threads: int
) -> tuple[Callable[[list[int]], float], Callable[[list[list[int]], int], list[float]]]:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=getattr(torch, dtype), attn_implementation="sdpa"
    ).eval()

    def read(prompts: list[list[int]]):
        with torch.inference_mode():
            output = model(torch.tensor(prompts), use_cache=True, logits_to_keep=1)
        return output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)

    def prefill(prompt: list[int]) -> float:
        began = time.perf_counter()
        read([prompt])
        return time.perf_counter() - began

    def decode(prompts: list[list[int]], steps: int) -> list[float]:
        cache, ids = read(prompts)
        seconds: list[float] = []
        with torch.inference_mode():
            for _ in range(steps):
                began = time.perf_counter()
                ids = model(ids, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1, keepdim=True)
                seconds.append(time.perf_counter() - began)
        return seconds

    prefill(talk.prompts(1, 600, 0)[0])
    return prefill, decode


if __name__ == "__main__":
    talk.serve(lambda: load(sys.argv[1], sys.argv[2], int(sys.argv[3])))
