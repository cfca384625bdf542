"""The attention interface: one description of a batch, one call, several backends.

Called by the model's layers. A batch is a list of sequences ("rows"): the decodes first, one query each, then the
chunks. Queries of all rows lie one after the other; keys and values lie in a paged cache whose layout is the
backend's own business (``allocate``), addressed by block ids only. Per iteration: ``plan`` once, then for each
layer ``write_kv`` and ``attend``. A query at position p sees the keys 0 … p of its row, or with a sliding window of
w keys the last w of them: p - w + 1 … p.

Backends: ``reference`` (here) gathers row by row and is the oracle of the others; ``native`` (``attention_native``)
is C++; ``torch`` (``attention_cpu``) does the same in batched torch operations where there is no compiler.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .memory import lazy_zeros
from .rope import apply_rope


@dataclass(slots=True)
class AttnBatch:
    """R rows with T queries in all. Counts are tokens.

    ``cu_q`` int32[R+1]: query offsets. ``kv_len`` int32[R]: keys of the row, the new ones included.
    ``block_table`` int32[R, n]. ``slot`` int64[T]: block × block size + offset of each new token, -1 = do not write.
    """

    cu_q: Tensor
    kv_len: Tensor
    block_table: Tensor
    slot: Tensor
    num_decodes: int


@dataclass(slots=True)
class KVCache:
    """Paged keys and values of a stage: one pair of tensors a layer, in the backend's layout."""

    keys: list[Tensor]
    values: list[Tensor]
    num_blocks: int
    block_size: int
    kv_heads: int
    head_dim: int


class AttentionBackend(Protocol):
    """What a backend offers. ``plan``'s result is opaque to the caller and valid for one iteration."""

    name: str

    def allocate(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        """Zero-filled cache memory."""
        ...

    def poison(self, cache: KVCache) -> None:
        """Fill every block with NaN, so that reading what was never written shows (tests)."""
        ...

    def plan(self, batch: AttnBatch, cache: KVCache) -> Any: ...

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, layer: int, plan: Any) -> None:
        """Store ``k`` and ``v`` [>= T, kv_heads, head_dim]: the first T rows, each where its slot says."""
        ...

    def place(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, plan: Any) -> None:
        """Rotate the query and key heads of ``qkv`` [>= T, heads + 2 kv_heads, head_dim] in place, and store keys and
        values as ``write_kv``. ``cos`` and ``sin`` as for ``apply_rope``."""
        ...

    def attend(
        self, q: Tensor, cache: KVCache, layer: int, plan: Any, out: Tensor, scale: float, window: int = 0
    ) -> None:
        """Attend with ``q`` [>= T, heads, head_dim]; writes the first T rows of ``out``, of the same shape.

        ``window``: how many keys a query sees, its own included; 0 for all.
        """
        ...


def kv_bytes_per_token(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Cache memory one token takes in one stage."""
    return 2 * layers * kv_heads * head_dim * dtype.itemsize


@dataclass(slots=True)
class _ReferencePlan:
    #: Per row: first query, last query + 1, and the cache index of each of its keys.
    rows: list[tuple[int, int, Tensor]]
    written: Tensor
    slot: Tensor


def place(
    backend: AttentionBackend, qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, plan: Any
) -> None:
    """``AttentionBackend.place`` in torch operations."""
    turned = qkv[:, : qkv.shape[1] - cache.kv_heads]
    turned.copy_(apply_rope(turned, cos, sin))
    backend.write_kv(turned[:, -cache.kv_heads :], qkv[:, -cache.kv_heads :], cache, layer, plan)


class ReferenceAttention:
    """Plain attention, one row at a time, in ``dtype`` (float64 for the oracle of kernel tests)."""

    name = "reference"

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self._dtype = dtype

    def allocate(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        def pages() -> list[Tensor]:
            shape = (num_blocks, block_size, kv_heads, head_dim)
            return [lazy_zeros(shape, dtype) for _ in range(layers)]

        return KVCache(pages(), pages(), num_blocks, block_size, kv_heads, head_dim)

    def poison(self, cache: KVCache) -> None:
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)

    def plan(self, batch: AttnBatch, cache: KVCache) -> _ReferencePlan:
        rows: list[tuple[int, int, Tensor]] = []
        bounds, lengths = batch.cu_q.tolist(), batch.kv_len.tolist()
        for row, length in enumerate(lengths):
            position = torch.arange(length)
            blocks = batch.block_table[row].to(torch.int64)[position // cache.block_size]
            index = blocks * cache.block_size + position % cache.block_size
            rows.append((bounds[row], bounds[row + 1], index))
        written = (batch.slot >= 0).nonzero().flatten()
        return _ReferencePlan(rows, written, batch.slot[written])

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, layer: int, plan: _ReferencePlan) -> None:
        for pages, new in ((cache.keys[layer], k), (cache.values[layer], v)):
            pages.flatten(0, 1).index_copy_(0, plan.slot, new[plan.written].to(pages.dtype))

    def place(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, plan: _ReferencePlan) -> None:
        place(self, qkv, cos, sin, cache, layer, plan)

    def attend(
        self, q: Tensor, cache: KVCache, layer: int, plan: _ReferencePlan, out: Tensor, scale: float, window: int = 0
    ) -> None:
        group = q.shape[1] // cache.kv_heads
        for begin, end, index in plan.rows:
            if begin == end:
                continue
            k = cache.keys[layer].flatten(0, 1)[index].to(self._dtype).repeat_interleave(group, 1)
            v = cache.values[layer].flatten(0, 1)[index].to(self._dtype).repeat_interleave(group, 1)
            scores = torch.einsum("qhd,khd->hqk", q[begin:end].to(self._dtype), k) * scale
            key, query = torch.arange(len(index)), torch.arange(len(index) - (end - begin), len(index))[:, None]
            hidden = (key > query) | (key <= query - window) if window else key > query
            scores.masked_fill_(hidden, -torch.inf)
            out[begin:end] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).to(out.dtype)
