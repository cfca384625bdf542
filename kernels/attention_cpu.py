"""Paged attention for the CPU in batched torch operations, with the same bits however the work is cut.

A query's keys are taken in tiles of ``TILE`` from position 0. Each tile gives a partial result (maximum, sum of
exponentials, weighted values); partials are joined in the order of the tiles by operations that IEEE arithmetic
rounds exactly. A tile that a query does not see changes nothing (factors 1 and 0), so tiles before a sliding window
are left out. The only inexact reductions are
matrix products and sums of fixed shape, so the bits do not depend on chunk boundaries, batch mates, block size or
padding, as long as a product's row does not depend on how many rows it has: ``_decode_rows`` checks that on the
running machine and pads as far as needed.

Rows of one query are cut into (row, tile) items that are computed many at a time; longer rows go by tiles of
``QUERIES`` queries. Arithmetic is float32 whatever the cache holds.

Layout: keys and values [kv_heads, num_blocks + 1, block_size × head_dim]. The last block is zeros: the gathered
tail of a last tile comes from there. Values after a row's end inside its last block are zeroed in the gathered copy,
since 0 × NaN is NaN.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from .attention import AttnBatch, KVCache, place
from .memory import lazy_zeros

TILE = 256
QUERIES = 128
#: (row, tile) items computed at a time: keys and values of a piece stay in the cache.
_PIECE = 8
#: Stands for "no key seen yet": exp(-inf - _NOTHING) is 0, where -inf - -inf would be NaN.
_NOTHING = -1e30


@dataclass(slots=True)
class _Items:
    """Rows of one query, cut into (row, tile) items: whole tiles first, then those with hidden keys."""

    #: Query index of each row, and row of each item.
    query: Tensor
    row: Tensor
    #: int64[items, kv_heads, blocks of a tile] into the flattened cache.
    blocks: Tensor
    #: Items before this one are whole.
    whole: int
    #: bool[items - whole, 1, 1, TILE]: keys after the row's end or before the window.
    hidden: Tensor
    #: For each piece that holds last tiles: index of the values to zero in the gathered piece.
    blank: dict[int, Tensor]
    #: int64[tiles × rows]: the item of each (tile, row), tiles counted from the row's first that is seen; the number
    #: of items where there is none.
    order: Tensor
    tiles: int


@dataclass(slots=True)
class _QueryTile:
    """Up to ``QUERIES`` queries of one chunk, and their tiles of the gathered keys from ``first`` on.

    ``masks[t]`` hides keys of tile ``first`` + t from rows; None = all seen.
    """

    begin: int
    end: int
    padded: int
    first: int
    masks: list[Tensor | None]


@dataclass(slots=True)
class _Chunk:
    #: int64[kv_heads × blocks] into the flattened cache, whole tiles, from the first that a query sees.
    blocks: Tensor
    keys: int
    blank: Tensor
    tiles: list[_QueryTile]


@dataclass(slots=True)
class _Plan:
    #: Rows of new keys to store and where in the flattened cache [kv_heads × slots]; None = the first T rows.
    written: Tensor | None
    tokens: int
    slot: Tensor
    #: For each row: first query, last query + 1 and keys; and the blocks of all rows.
    rows: list[tuple[int, int, int]]
    table: Tensor
    #: How the rows are cut, for each sliding window that a layer asked for.
    work: dict[int, tuple[_Items | None, list[_Chunk]]]


class CPUAttention:
    """See the module."""

    name = "torch"

    def __init__(self) -> None:
        self._padded: dict[tuple[int, int], int] = {}

    def allocate(
        self, layers: int, num_blocks: int, block_size: int, kv_heads: int, head_dim: int, dtype: torch.dtype
    ) -> KVCache:
        if block_size < 1 or TILE % block_size:
            raise ValueError(f"block size {block_size} does not divide {TILE}")

        def pages() -> list[Tensor]:
            shape = (kv_heads, num_blocks + 1, block_size * head_dim)
            return [lazy_zeros(shape, dtype) for _ in range(layers)]

        return KVCache(pages(), pages(), num_blocks, block_size, kv_heads, head_dim)

    def poison(self, cache: KVCache) -> None:
        for tensor in (*cache.keys, *cache.values):
            tensor[:, :-1].fill_(torch.nan)

    def plan(self, batch: AttnBatch, cache: KVCache) -> _Plan:
        bounds = batch.cu_q.tolist()
        slot, written = batch.slot, None
        if bool((slot < 0).any()):
            written = (slot >= 0).nonzero().flatten()
            slot = slot[written]
        heads = torch.arange(cache.kv_heads)[:, None] * ((cache.num_blocks + 1) * cache.block_size)
        return _Plan(
            written=written,
            tokens=len(batch.slot),
            slot=(heads + slot).flatten(),
            rows=list(zip(bounds, bounds[1:], batch.kv_len.tolist(), strict=False)),
            table=batch.block_table.to(torch.int64),
            work={},
        )

    def write_kv(self, k: Tensor, v: Tensor, cache: KVCache, layer: int, plan: _Plan) -> None:
        for pages, new in ((cache.keys[layer], k), (cache.values[layer], v)):
            rows = new[: plan.tokens] if plan.written is None else new[plan.written]
            flat = rows.transpose(0, 1).to(pages.dtype).reshape(-1, cache.head_dim)
            pages.view(-1, cache.head_dim).index_copy_(0, plan.slot, flat)

    def place(self, qkv: Tensor, cos: Tensor, sin: Tensor, cache: KVCache, layer: int, plan: _Plan) -> None:
        place(self, qkv, cos, sin, cache, layer, plan)

    def attend(
        self, q: Tensor, cache: KVCache, layer: int, plan: _Plan, out: Tensor, scale: float, window: int = 0
    ) -> None:
        items, chunks = plan.work.get(window) or _cut(plan, cache, window)
        keys, values = (pages[layer].flatten(0, 1) for pages in (cache.keys, cache.values))
        grouped = q.view(len(q), cache.kv_heads, -1, cache.head_dim).to(torch.float32) * scale
        result = out.view(len(out), cache.kv_heads, -1, cache.head_dim)
        if items is not None:
            group = grouped.shape[2]
            padded = self._padded.get((group, cache.head_dim))
            if padded is None:
                padded = self._padded[group, cache.head_dim] = _decode_rows(group, cache.head_dim)
            _attend_items(grouped, keys, values, items, result, padded)
        for chunk in chunks:
            _attend_chunk(grouped, keys, values, chunk, result)


def _cut(plan: _Plan, cache: KVCache, window: int) -> tuple[_Items | None, list[_Chunk]]:
    """Cut the rows for layers with this window; kept for the other layers of the iteration that have it."""
    single = [(row, begin, length) for row, (begin, end, length) in enumerate(plan.rows) if end - begin == 1]
    items = _plan_items(single, plan.table, cache, window) if single else None
    chunks = [
        _plan_chunk(begin, end, length, plan.table[row], cache, window)
        for row, (begin, end, length) in enumerate(plan.rows)
        if end - begin > 1
    ]
    plan.work[window] = items, chunks
    return items, chunks


def _plan_items(single: list[tuple[int, int, int]], table: Tensor, cache: KVCache, window: int) -> _Items:
    """``single``: (row, query, keys) of each row of one query."""
    size = cache.block_size
    per_tile = TILE // size
    rows, query, kv_len = torch.tensor(single).unbind(1)
    # The first key that is seen, and the tiles from its own on.
    lowest = (kv_len - window).clamp(min=0) if window else torch.zeros_like(kv_len)
    first = lowest // TILE
    counts = -(-kv_len // TILE) - first
    tiles = int(counts.max())
    # (tile, row) pairs that exist, whole tiles first; the tile counts from the row's first.
    tile = torch.arange(tiles)[:, None]
    exists = tile < counts
    has_hidden = (tile == counts - 1) | ((tile == 0) & (lowest > first * TILE))
    whole = (exists & ~has_hidden).nonzero()
    masked = (exists & has_hidden).nonzero()
    pairs = torch.cat((whole, masked))
    items = len(pairs)
    order = torch.full((tiles, len(rows)), items)
    order[pairs[:, 0], pairs[:, 1]] = torch.arange(items)
    # Blocks of each item; those after the row's end are the block of zeros.
    chosen = table[rows]
    used = -(-kv_len // size)
    block = (pairs[:, :1] + first[pairs[:, 1], None]) * per_tile + torch.arange(per_tile)
    inside = block < used[pairs[:, 1], None]
    ids = chosen[pairs[:, 1, None], block.clamp(max=chosen.shape[1] - 1)]
    ids = torch.where(inside, ids, cache.num_blocks)
    heads = torch.arange(cache.kv_heads)[:, None] * (cache.num_blocks + 1)
    # Keys that the masked tiles do not have, and those before the window.
    key = (masked[:, 0] + first[masked[:, 1]])[:, None] * TILE + torch.arange(TILE)
    absent = key >= kv_len[masked[:, 1], None]
    hidden = absent | (key < lowest[masked[:, 1], None])
    blank: dict[int, Tensor] = {}
    for begin in range(0, items, _PIECE):
        end = min(begin + _PIECE, items)
        if end > len(whole):
            offset = max(begin, len(whole))
            item, key = absent[offset - len(whole) : end - len(whole)].nonzero(as_tuple=True)
            base = (item + offset - begin)[:, None] * cache.kv_heads + torch.arange(cache.kv_heads)
            blank[begin] = (base * TILE + key[:, None]).flatten()
    return _Items(
        query=query.contiguous(),
        row=pairs[:, 1].contiguous(),
        blocks=heads + ids[:, None, :],
        whole=len(whole),
        hidden=hidden[:, None, None, :],
        blank=blank,
        order=order.flatten(),
        tiles=tiles,
    )


def _attend_items(q: Tensor, keys: Tensor, values: Tensor, plan: _Items, out: Tensor, padded: int) -> None:
    rows, kv_heads, group, dim = len(plan.query), q.shape[1], q.shape[2], q.shape[3]
    items = len(plan.row)
    queries = torch.zeros(rows, kv_heads, padded, dim)
    queries[:, :, :group] = q[plan.query]
    queries = queries.index_select(0, plan.row)
    # One partial more than there are items: that of a tile which a row does not have.
    peak = torch.full((items + 1, kv_heads, padded, 1), _NOTHING)
    total = torch.zeros(items + 1, kv_heads, padded, 1)
    weighted = torch.zeros(items + 1, kv_heads, padded, dim)
    for begin in range(0, items, _PIECE):
        end = min(begin + _PIECE, items)
        index = plan.blocks[begin:end].flatten()
        k = keys.index_select(0, index).to(torch.float32).view(-1, TILE, dim)
        v = values.index_select(0, index).to(torch.float32).view(-1, TILE, dim)
        if begin in plan.blank:
            v.view(-1, dim).index_fill_(0, plan.blank[begin], 0.0)
        scores = torch.bmm(queries[begin:end].view(-1, padded, dim), k.transpose(1, 2))
        scores = scores.view(end - begin, kv_heads, padded, TILE)
        if end > plan.whole:
            masked = max(begin, plan.whole)
            hidden = plan.hidden[masked - plan.whole : end - plan.whole]
            scores[masked - begin :].masked_fill_(hidden, -torch.inf)
        high = scores.amax(-1, keepdim=True)
        scores.sub_(high).exp_()
        peak[begin:end] = high
        total[begin:end] = scores.sum(-1, keepdim=True)
        torch.bmm(scores.view(-1, padded, TILE), v, out=weighted[begin:end].view(-1, padded, dim))
    shape = (plan.tiles, rows, kv_heads, padded)
    peak = peak.index_select(0, plan.order).view(*shape, 1)
    total = total.index_select(0, plan.order).view(*shape, 1)
    weighted = weighted.index_select(0, plan.order).view(*shape, dim)
    # Join: with the running maximum, old results are scaled by ``keep`` and the tile's by ``add``.
    running = torch.cummax(peak, dim=0).values
    add = (peak - running).exp_()
    keep = torch.ones_like(running)
    torch.sub(running[:-1], running[1:], out=keep[1:])
    keep[1:].exp_()
    total.mul_(add)
    weighted.mul_(add)
    for tile in range(1, plan.tiles):
        total[tile].add_(total[tile - 1].mul_(keep[tile]))
        weighted[tile].add_(weighted[tile - 1].mul_(keep[tile]))
    out[plan.query] = (weighted[-1] / total[-1])[:, :, :group].to(out.dtype)


def _plan_chunk(begin: int, end: int, length: int, table: Tensor, cache: KVCache, window: int) -> _Chunk:
    size = cache.block_size
    before = length - (end - begin)
    # Keys from the first tile that a query sees.
    skipped = max(0, before - window + 1) // TILE * TILE if window else 0
    used = -(-length // size)
    keys = -(-length // TILE) * TILE - skipped
    ids = torch.full((keys // size,), cache.num_blocks)
    ids[: used - skipped // size] = table[skipped // size : used]
    heads = torch.arange(cache.kv_heads)[:, None]
    tail = torch.arange(length, used * size) - skipped
    tiles: list[_QueryTile] = []
    for first in range(begin, end, QUERIES):
        last = min(first + QUERIES, end)
        padded = -(-(last - first) // 16) * 16
        # Positions of the queries; rows that only pad see what the first query sees.
        position = torch.full((padded,), length - (end - first))
        position[: last - first] += torch.arange(last - first)
        lowest, highest = length - (end - first), length - (end - last) - 1
        seen = max(0, lowest - window + 1) // TILE if window else 0
        masks: list[Tensor | None] = []
        for tile in range(seen, highest // TILE + 1):
            key = torch.arange(tile * TILE, (tile + 1) * TILE)
            mask = None if (tile + 1) * TILE <= lowest + 1 else key > position[:, None]
            if window and tile * TILE <= highest - window:
                outside = key <= position[:, None] - window
                mask = outside if mask is None else mask | outside
            masks.append(mask)
        tiles.append(_QueryTile(first, last, padded, seen - skipped // TILE, masks))
    return _Chunk(
        blocks=(heads * (cache.num_blocks + 1) + ids).flatten(),
        keys=keys,
        blank=(heads * keys + tail).flatten(),
        tiles=tiles,
    )


def _attend_chunk(q: Tensor, keys: Tensor, values: Tensor, plan: _Chunk, out: Tensor) -> None:
    kv_heads, group, dim = q.shape[1:]
    k = keys.index_select(0, plan.blocks).to(torch.float32).view(kv_heads, plan.keys, dim)
    v = values.index_select(0, plan.blocks).to(torch.float32).view(kv_heads, plan.keys, dim)
    v.view(-1, dim).index_fill_(0, plan.blank, 0.0)
    for tile in plan.tiles:
        rows = tile.padded * group
        queries = torch.zeros(kv_heads, tile.padded, group, dim)
        queries[:, : tile.end - tile.begin] = q[tile.begin : tile.end].transpose(0, 1)
        queries = queries.view(kv_heads, rows, dim)
        peak = torch.full((kv_heads, rows, 1), _NOTHING)
        total = torch.zeros(kv_heads, rows, 1)
        weighted = torch.zeros(kv_heads, rows, dim)
        for number, mask in enumerate(tile.masks, tile.first):
            at = slice(number * TILE, (number + 1) * TILE)
            scores = torch.bmm(queries, k[:, at].transpose(1, 2))
            if mask is not None:
                scores.view(kv_heads, tile.padded, group, TILE).masked_fill_(mask[:, None, :], -torch.inf)
            high = scores.amax(-1, keepdim=True).clamp_(min=_NOTHING)
            scores.sub_(high).exp_()
            running = torch.maximum(peak, high)
            keep, add = peak.sub_(running).exp_(), high.sub_(running).exp_()
            total.mul_(keep).add_(scores.sum(-1, keepdim=True).mul_(add))
            weighted.mul_(keep).add_(torch.bmm(scores, v[:, at]).mul_(add))
            peak = running
        result = weighted.div_(total).view(kv_heads, tile.padded, group, dim)
        out[tile.begin : tile.end] = result[:, : tile.end - tile.begin].transpose(0, 1).to(out.dtype)


def _decode_rows(group: int, dim: int) -> int:
    """Rows to which one query's heads are padded, so that they have the bits they have within a chunk."""
    generator = torch.Generator().manual_seed(0)
    chunk = QUERIES * group
    queries = torch.randn(2, chunk, dim, generator=generator)
    keys, values = torch.randn(2, 2, TILE, dim, generator=generator)
    scores = torch.bmm(queries, keys.transpose(1, 2))
    weighted = torch.bmm(scores, values)
    padded = -(-group // 4) * 4
    while padded < chunk:
        few = torch.bmm(queries[:, :padded].contiguous(), keys.transpose(1, 2))
        if torch.equal(few, scores[:, :padded]) and torch.equal(torch.bmm(few, values), weighted[:, :padded]):
            break
        padded *= 2
    return padded
