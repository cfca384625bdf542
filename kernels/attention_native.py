"""Paged attention in C++ (``cpu/attention.h``): rows of any length in one call, the same bits however work is cut.

Keys are taken in tiles of 64 from position 0, for all query heads that share them at once; arithmetic is float32
whatever the cache holds. Blocks may have any size.

Layout: [num_blocks, layers, 2]; of these keys [kv_heads, head_dim, block_size], so that a vector holds one dimension
of several keys, and values [kv_heads, block_size, head_dim].
"""

import torch
from torch import Tensor

from .attention import AttnBatch, KVCache
from .memory import lazy_zeros


class NativeAttention:
    """See the module. Only where ``cpu.available``, and for queries in float32."""

    name = "native"

    def allocate(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        # A block of all layers lies together, so that memory is asked of the system as blocks are used first: were
        # each layer's blocks together, all layers would reach the end of a page at once, and one iteration would
        # wait for 2 MiB of zeros for each of them.
        memory = lazy_zeros((num_blocks, layers, 2, kv_heads * head_dim * block_size), dtype)
        keys, values = (num_blocks, kv_heads, head_dim, block_size), (num_blocks, kv_heads, block_size, head_dim)
        return KVCache(
            [memory[:, layer, 0].view(keys) for layer in range(layers)],
            [memory[:, layer, 1].view(values) for layer in range(layers)],
            num_blocks,
            block_size,
            kv_heads,
            head_dim,
        )

    def poison(self, cache: KVCache) -> None:
        for tensor in (*cache.keys, *cache.values):
            tensor.fill_(torch.nan)

    def plan(self, batch: AttnBatch, cache: KVCache) -> AttnBatch:
        return batch

    def place(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, plan: AttnBatch) -> None:
        self._place(qkv, cos, sin, cache, layer, plan)

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, layer: int, plan: AttnBatch) -> None:
        self._place(torch.cat((k, v), 1), None, None, cache, layer, plan)

    def _place(
        self, qkv: Tensor, cos: Tensor | None, sin: Tensor | None, cache: KVCache, layer: int, plan: AttnBatch
    ) -> None:
        torch.ops.evenflow.place(qkv.flatten(1), cos, sin, plan.slot, cache.keys[layer], cache.values[layer])

    def attend(
        self, q: Tensor, cache: KVCache, layer: int, plan: AttnBatch, out: Tensor, scale: float, window: int = 0
    ) -> None:
        torch.ops.evenflow.attend(
            q.flatten(1),
            cache.keys[layer],
            cache.values[layer],
            plan.cu_q,
            plan.kv_len,
            plan.block_table,
            scale,
            window,
            out.flatten(1),
        )
