"""Batches for the tests of attention backends: whole sequences, run in any steps over any blocks."""

import random
from collections.abc import Sequence
from itertools import pairwise

import torch
from evenflow.kernels.attention import AttentionBackend, AttnBatch
from torch import Tensor

DIM = 32


def batch_of(rows: Sequence[tuple[int, int, list[int]]], block_size: int) -> AttnBatch:
    """Rows of (tokens before, new tokens, blocks)."""
    width = max(len(blocks) for _, _, blocks in rows)
    slots = [
        blocks[position // block_size] * block_size + position % block_size
        for before, new, blocks in rows
        for position in range(before, before + new)
    ]
    offsets = [0]
    for _, new, _ in rows:
        offsets.append(offsets[-1] + new)
    return AttnBatch(
        cu_q=torch.tensor(offsets, dtype=torch.int32),
        kv_len=torch.tensor([before + new for before, new, _ in rows], dtype=torch.int32),
        block_table=torch.tensor([blocks + [0] * (width - len(blocks)) for *_, blocks in rows], dtype=torch.int32),
        slot=torch.tensor(slots),
        num_decodes=sum(new == 1 for _, new, _ in rows),
    )


def sequences(
    lengths: Sequence[int], heads: int, kv_heads: int, seed: int = 0, dim: int = DIM
) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Queries, keys and values of whole sequences."""
    generator = torch.Generator().manual_seed(seed)

    def draw(length: int, count: int) -> Tensor:
        return torch.randn(length, count, dim, generator=generator)

    return [(draw(n, heads) * 3, draw(n, kv_heads), draw(n, kv_heads)) for n in lengths]


def run(
    backend: AttentionBackend,
    data: list[tuple[Tensor, Tensor, Tensor]],
    steps: Sequence[Sequence[tuple[int, int, int]]],
    block_size: int,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    window: int = 0,
) -> list[Tensor]:
    """Attention output of every token. A step is rows of (sequence, tokens before, new tokens)."""
    kv_heads, dim = data[0][1].shape[1:]
    counts = [-(-len(q) // block_size) for q, _, _ in data]
    ids = list(range(sum(counts) + 3))
    random.Random(seed).shuffle(ids)
    cache = backend.allocate(1, len(ids), block_size, kv_heads, dim, dtype)
    backend.poison(cache)
    blocks = [[ids.pop() for _ in range(count)] for count in counts]
    outputs = [torch.full_like(q, torch.nan) for q, _, _ in data]
    for step in steps:
        rows = [(before, new, blocks[index][: -(-(before + new) // block_size)]) for index, before, new in step]
        batch = batch_of(rows, block_size)
        plan = backend.plan(batch, cache)
        q, k, v = (
            torch.cat([data[index][part][before : before + new] for index, before, new in step]) for part in range(3)
        )
        backend.write_kv(k, v, cache, 0, plan)
        out = torch.full_like(q, torch.nan)
        if window:
            # A layer without the window comes first, as in models in which only some layers have one.
            backend.attend(q, cache, 0, plan, out.clone(), dim**-0.5)
        backend.attend(q, cache, 0, plan, out, dim**-0.5, window)
        for (index, before, new), (begin, end) in zip(step, pairwise(batch.cu_q.tolist()), strict=True):
            outputs[index][before : before + new] = out[begin:end]
    return outputs


def chunked(length: int, chunk: int, index: int = 0) -> list[list[tuple[int, int, int]]]:
    return [[(index, begin, min(chunk, length - begin))] for begin in range(0, length, chunk)]
