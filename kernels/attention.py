"""Attention over the paged KV cache for a mixed batch of decode rows and prefill chunks.

    out[r] = softmax(scale * q[r] · K[0 … p(r)]ᵀ) · V[0 … p(r)]      p(r): position of row r

K and V are those of the row's own sequence, found through its block table; the cached prefix and
the chunk's own positions are alike, since a layer writes K and V before it attends. Grouped-query
attention: query head h reads KV head ``h // (Hq / Hkv)``.

The rows are cut into *groups*: a decode row is a group of one query, a chunk is cut into groups
of ``QUERY_TILE`` queries. The keys are read in tiles of positions with the online softmax of
Milakov and Gimelshein (2018), as in FlashAttention. Where tiles are several, groups are sorted by
context length, longest first, so tile t is one batched product over the groups that reach it.

A tile also covers positions past a group's context. Their scores are masked, so their weights are
0 exactly; what V holds there must be finite, which is the caller's part: blocks are cleared when
they are handed out (``kv_cache.clear_blocks``), and a block table is filled up with a block that
stays clear.

*Exact* batches are for fp32 on the CPU, where a row's bits must not depend on the batch or the
chunking. The library gives a row of a batched product the same bits for every number of rows that
is a multiple of ``ROW_MULTIPLE`` (measured with oneMKL on Zen 5, and on Sapphire Rapids with its
strict reproducibility switched on). It does not for every number of keys: a sum over 256 keys may
be split otherwise than one over 192 or 512. Hence the fixed tile of ``KV_TILE``, the padding of
rows, and the merge in ascending order. A tile that a row does not see leaves its result untouched
bit by bit (factor exp(0) = 1, addend 0).

Other batches are cut as is fastest: tiles of up to ``WIDE_TILE`` that end with the longest
context's last block. Maxima, sums and accumulators are fp32 always. In bf16 large products run in
bf16 and small ones of decode in fp32: on the CPU a bf16 product costs 12 µs before it computes
anything, as much as converting 64 Ki elements.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention_backend import (
    BoolArray,
    CacheShape,
    IntArray,
    PlannedBatch,
    QuerySpans,
    RowPlaces,
    row_places,
)

KV_TILE = 128
"""Key positions in one product of an exact batch. A multiple of every block size."""
WIDE_TILE = 512
"""Key positions, at most, in one product of other batches."""
QUERY_TILE = 32
"""Queries of a prefill chunk in one group."""
ROW_MULTIPLE = 4
_MAX_TILE_ELEMENTS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Bounds the scores and the gathered keys of one product. On the CPU they stay in its cache:
measured 1.4 times as fast as products of 4 Mi elements; on a GPU large products are better."""
_FP32_ELEMENTS = 64 * 1024
"""Decode products over at most this many gathered elements run in fp32."""


class Tile(NamedTuple):
    """Consecutive positions of the first ``groups`` groups."""

    groups: int
    width: int
    """Positions, a multiple of the block size."""
    gather: Tensor
    """[groups * Hkv * blocks of the tile] int64: rows of the cache as [Hkv * num_blocks, …]."""
    hidden: Tensor | None
    """[groups, 1, queries, 1, width] bool: keys after the query; ``None``: all are seen, or the
    only query of the batch sees the first ``seen``."""
    seen: int
    """Keys from the first on that the last query sees; may be more than ``width``."""


class AttentionBatch(NamedTuple):
    """Groups with the same number of queries, planned on the host once for all layers."""

    num_groups: int
    num_queries: int
    exact: bool
    places: RowPlaces
    tiles: list[Tile]

    def attend(self, query: Tensor, key_cache: Tensor, value_cache: Tensor, scale: float) -> Tensor:
        """query: [groups * queries, Hq, D]. Returns [groups * queries, Hq * D]."""
        return _attend(query, key_cache, value_cache, self, scale)


class ReferenceAttention:
    """The backend of this module."""

    name = "the reference"
    finite_keys = False

    def plan(
        self, spans: QuerySpans, shape: CacheShape, device: torch.device
    ) -> Sequence[PlannedBatch]:
        rows, starts, counts, tables = spans
        if counts is None:
            return plan_groups(rows[:, None], starts[:, None], None, tables, shape, device)
        owners, offsets, real = cut(counts)
        rows, starts = rows[owners, None] + offsets, starts[owners, None] + offsets
        return plan_groups(rows, starts, real, tables[owners], shape, device)


def cut(counts: IntArray) -> tuple[IntArray, IntArray, BoolArray]:
    """Groups of ``QUERY_TILE`` queries of spans of so many rows.

    Returns for each group the index of its span, [B, Q] the queries' offsets in it, and False
    where a query is padding: the last group is filled up with the span's last query.
    """
    groups = -(-counts // QUERY_TILE)
    owners = np.repeat(np.arange(len(counts), dtype=np.int64), groups)
    first = np.cumsum(groups) - groups
    inside = np.arange(len(owners), dtype=np.int64) - first[owners]
    offsets = inside[:, None] * QUERY_TILE + np.arange(QUERY_TILE, dtype=np.int64)
    last = counts[owners, None] - 1
    return owners, np.minimum(offsets, last), offsets <= last


def plan_groups(
    rows: IntArray,
    positions: IntArray,
    real: BoolArray | None,
    block_tables: IntArray,
    shape: CacheShape,
    device: torch.device,
) -> list[AttentionBatch]:
    """Plan the groups of a step that have the same number of queries.

    rows: [B, Q] row of each query in the step; positions: [B, Q]; real: [B, Q] False for padding,
    which must repeat a real query of its group; block_tables: [B, W] with W a multiple of the
    blocks of a ``KV_TILE``, every entry a valid block id, those past the context's blocks of a
    block without NaN or infinity.
    """
    context = positions[:, -1] + 1 if rows.shape[1] == 1 else positions.max(axis=1) + 1
    longest = int(context.max())
    tile = KV_TILE if shape.exact else _wide_tile(longest, shape.block_size)
    if int(context.min()) <= (longest - 1) // tile * tile:
        order = np.argsort(-context, kind="stable")
        rows, positions, context = rows[order], positions[order], context[order]
        block_tables = block_tables[order]
        real = real[order] if real is not None else None
    width = tile * max(shape.head_dim * shape.num_kv_heads, shape.num_query_heads * rows.shape[1])
    at_once = max(1, _MAX_TILE_ELEMENTS[device.type] // width)
    batches = []
    for first in range(0, len(rows), at_once):
        part = slice(first, first + at_once)
        batches.append(
            _plan_batch(
                rows[part],
                positions[part],
                real[part] if real is not None else None,
                context[part],
                block_tables[part],
                shape,
                tile,
                device,
            )
        )
    return batches


def _wide_tile(longest: int, block_size: int) -> int:
    """Width of the tiles of a batch that is not exact: few, and alike."""
    tiles = -(-longest // WIDE_TILE)
    return -(-longest // (tiles * block_size)) * block_size


def _plan_batch(
    rows: IntArray,
    positions: IntArray,
    real: BoolArray | None,
    context: IntArray,
    block_tables: IntArray,
    shape: CacheShape,
    tile: int,
    device: torch.device,
) -> AttentionBatch:
    tiles = []
    longest = int(context.max())
    end = -(-longest // shape.block_size) * shape.block_size
    for start in range(0, longest, tile):
        groups = int(np.count_nonzero(context > start))
        width = tile if shape.exact else min(tile, end - start)
        tiles.append(_plan_tile(start, width, positions[:groups], block_tables, shape, device))
    places = row_places(rows.reshape(-1), real.reshape(-1) if real is not None else None, device)
    return AttentionBatch(len(rows), rows.shape[1], shape.exact, places, tiles)


def _plan_tile(
    start: int,
    width: int,
    positions: IntArray,
    block_tables: IntArray,
    shape: CacheShape,
    device: torch.device,
) -> Tile:
    """``positions`` are those of the groups that reach it, the first of ``block_tables``."""
    groups = len(positions)
    first, blocks = start // shape.block_size, width // shape.block_size
    table = block_tables[:groups, None, first : first + blocks]
    heads = np.arange(shape.num_kv_heads, dtype=np.int64)[:, None] * shape.num_blocks
    gather = torch.from_numpy((table + heads).reshape(-1)).to(device)
    hidden = None
    seen = int(positions[-1, -1]) + 1 - start
    alone = positions.size == 1 and start == 0 and seen <= width and not shape.exact
    if not alone and int(positions.min()) < start + width - 1:
        keys = np.arange(start, start + width, dtype=np.int64)
        after = keys > positions[:, :, None]
        hidden = torch.from_numpy(after[:, None, :, None, :]).to(device)
    return Tile(groups, width, gather, hidden, seen)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batches: Sequence[PlannedBatch],
    scale: float,
) -> Tensor:
    """Attend with every row of a step.

    query: [N, Hq, D] (any strides); key_cache, value_cache: [Hkv, num_blocks, block_size, D] of
    the same dtype; batches: from ``AttentionBackend.plan``, of one backend or several. Returns
    [N, Hq * D]; rows in no batch are zero.
    """
    rows, heads, dim = query.shape
    if len(batches) == 1:
        places = batches[0].places
        if places.sources is None and places.kept is None and places.num_rows == rows:
            return batches[0].attend(query, key_cache, value_cache, scale)
    out = torch.zeros(rows, heads * dim, dtype=query.dtype, device=query.device)
    for batch in batches:
        count, sources, kept, targets = batch.places
        picked = query[:count] if sources is None else query.index_select(0, sources)
        result = batch.attend(picked, key_cache, value_cache, scale)
        if kept is not None:
            result = result.index_select(0, kept)
        out.index_copy_(0, targets, result)
    return out


def _attend(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, batch: AttentionBatch, scale: float
) -> Tensor:
    """query: [groups * queries, Hq, D]. Returns [groups * queries, Hq * D] for one batch."""
    kv_heads, blocks, block_size, dim = key_cache.shape
    heads = query.shape[1]
    shared = heads // kv_heads
    groups, queries = batch.num_groups, batch.num_queries
    if groups == 1 and queries == 1 and len(batch.tiles) == 1 and not batch.exact:
        return _attend_alone(query, key_cache, value_cache, batch.tiles[0], scale)
    dtype = query.dtype
    if queries == 1 and groups * kv_heads * batch.tiles[0].width * dim <= _FP32_ELEMENTS:
        dtype = torch.float32
    packed = query.to(dtype) * scale
    if queries > 1:
        packed = packed.view(groups, queries, kv_heads, shared, dim).transpose(1, 2)
    # Query rows of one KV head: [groups * Hkv, M, D], M a multiple of ROW_MULTIPLE if exact.
    packed = packed.reshape(groups * kv_heads, queries * shared, dim)
    padding = -(queries * shared) % ROW_MULTIPLE if batch.exact else 0
    if padding:
        packed = torch.nn.functional.pad(packed, (0, 0, 0, padding))
    keys = key_cache.view(kv_heads * blocks, block_size * dim)
    values = value_cache.view(kv_heads * blocks, block_size * dim)
    top = total = mixed = None
    for tile in batch.tiles:
        active = tile.groups * kv_heads
        key = keys.index_select(0, tile.gather).view(active, tile.width, dim).to(dtype)
        value = values.index_select(0, tile.gather).view(active, tile.width, dim).to(dtype)
        scores = torch.bmm(packed[:active], key.transpose(1, 2)).float()
        if tile.hidden is not None:
            # With padding there is one query in a group: -1 then covers its padding rows too.
            shape = (tile.groups, kv_heads, queries, -1, tile.width)
            scores.view(shape).masked_fill_(tile.hidden, -torch.inf)
        if len(batch.tiles) == 1 and not batch.exact:
            mixed = torch.bmm(torch.softmax(scores, -1).to(dtype), value)
            break
        highest = scores.amax(-1, keepdim=True)
        if top is None or total is None or mixed is None:
            weights = scores.sub_(highest).exp_()
            top, total = highest, weights.sum(-1, keepdim=True)
            mixed = torch.bmm(weights.to(dtype), value).float()
            continue
        highest = torch.maximum(top[:active], highest)
        decay = (top[:active] - highest).exp_()
        weights = scores.sub_(highest).exp_()
        top[:active] = highest
        total[:active].mul_(decay).add_(weights.sum(-1, keepdim=True))
        mixed[:active].mul_(decay).add_(torch.bmm(weights.to(dtype), value))
    if mixed is None:
        raise ValueError("an attention batch needs at least one key position")
    if total is not None:
        mixed = mixed.div_(total)
    if padding:
        mixed = mixed[:, : queries * shared]
    if queries > 1:
        mixed = mixed.view(groups, kv_heads, queries, shared, dim).transpose(1, 2)
    return mixed.reshape(groups * queries, heads * dim).to(query.dtype)


def _attend_alone(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, tile: Tile, scale: float
) -> Tensor:
    """One query whose context is one tile: fused attention over what it sees, so without a mask.

    The query heads that share K and V stand as its queries. (For more rows the fused attention is
    slower than the batched products: 195 µs against 87 for 32 rows.)
    """
    kv_heads, blocks, block_size, dim = key_cache.shape
    key, value = (
        cache.view(kv_heads * blocks, block_size * dim)
        .index_select(0, tile.gather)
        .view(1, kv_heads, tile.width, dim)[:, :, : tile.seen]
        for cache in (key_cache, value_cache)
    )
    shared = query.view(1, kv_heads, -1, dim)
    mixed = torch.nn.functional.scaled_dot_product_attention(shared, key, value, scale=scale)
    return mixed.reshape(1, -1)
