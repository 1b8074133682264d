"""Attention over the paged KV cache for a mixed batch of decode rows and prefill chunks.

    out[r] = softmax(scale * q[r] · K[f(r) … p(r)]ᵀ) · V[f(r) … p(r)]

p(r) is the position of row r; f(r) is 0, or p(r) - window + 1 in a layer with a window, or in one
with chunks the first position of p(r)'s chunk (Llama 4's ``attention_chunk_size``). With a soft cap
a score s becomes cap * tanh(s / cap) before the softmax (Gemma 2 technical report, 2024).
With sinks the softmax of query head h has one more score, the number ``sinks[h]``, whose weight
goes to no value (gpt-oss model card, 2025). Ahead of f(r) a row may see whole blocks besides.

K and V are those of the row's own sequence, found through its block table; the cached prefix and
the chunk's own positions are alike, since a layer writes K and V before it attends. Grouped-query
attention: query head h reads KV head ``h // (Hq / Hkv)``.

The rows are cut into *groups*: a decode row is a group of one query, a chunk is cut into groups
of ``QUERY_TILE`` queries. (Longer chunks of exact batches are cut otherwise: see
``exact_attention.py``.) The keys are read in tiles of positions with the online softmax of
Milakov and Gimelshein (2018), as in FlashAttention. Where tiles are several, groups are sorted by
context length, longest first, so a tile is one batched product over consecutive groups, those that
see some of it. Tiles that no group sees are not read, nor are blocks ahead of f(r) that are not
seen besides.

A tile also covers positions that a group does not see. Their scores are masked, so their weights
are 0 exactly; what V holds there must be finite, which is the caller's part: blocks are cleared
when they are handed out (``kv_cache.clear_blocks``), and a block table is filled up with a block
that stays clear.

*Exact* batches are for fp32 on the CPU, where a row's bits must not depend on the batch, the
chunking or the number of threads. The library gives a row of a batched product the same bits for
every number of rows that is a multiple of ``ROW_MULTIPLE`` (measured with oneMKL on Zen 4 and
Zen 5, and on Sapphire Rapids with its strict reproducibility switched on). It does not for every
number of keys: a sum over 256 keys may be split otherwise than one over 192 or 512. Hence the
fixed tile of ``KV_TILE``, the padding of rows, and the merge in ascending order. Weights are powers
of two, in vectors that no thread cuts (``powers_of_two.py``). A tile that a row
does not see leaves its result untouched bit by bit: behind its last key the factor is exp(0) = 1
and the addend 0; ahead of its first one the sums stay 0 and the maximum ``LOWEST``.

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
from torch.nn.functional import pad

from penstock.kernels.attention_backend import (
    BoolArray,
    CacheShape,
    IntArray,
    PlannedBatch,
    QuerySpans,
    RowPlaces,
    row_places,
)
from penstock.kernels.attention_products import attend
from penstock.kernels.exact_attention import KV_TILE, plan_chunk

__all__ = ["KV_TILE", "AttentionBatch", "ReferenceAttention", "paged_attention", "plan_groups"]

WIDE_TILE = 512
"""Key positions, at most, in one product of other batches."""
QUERY_TILE = 32
"""Queries of a prefill chunk in one group."""
_MAX_TILE_ELEMENTS = {"cpu": 1024 * 1024, "cuda": 32 * 1024 * 1024}
"""Bounds the scores and the gathered keys of one product. On the CPU they stay in its cache:
measured 1.4 times as fast as products of 4 Mi elements; on a GPU large products are better."""


class Tile(NamedTuple):
    """Consecutive positions of consecutive groups, ``first`` to ``end`` - 1."""

    first: int
    end: int
    width: int
    """Positions, a multiple of the block size."""
    gather: Tensor
    """[groups * Hkv * blocks of the tile] int64: rows of the cache as [Hkv * num_blocks, …]."""
    hidden: Tensor | None
    """[groups, 1, queries, 1, width] bool: keys that a query does not see; ``None``: all are seen,
    or the only query of the batch sees those in ``seen``."""
    seen: slice
    """The keys that the last query sees; its end may be more than ``width``."""


class AttentionBatch(NamedTuple):
    """Groups with the same number of queries, planned on the host once for all layers."""

    num_groups: int
    num_queries: int
    exact: bool
    windowed: bool
    """Whether a query may see nothing of a tile ahead of what it sees."""
    softcap: float
    places: RowPlaces
    tiles: list[Tile]

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query: [groups * queries, Hq, D]. Returns [groups * queries, Hq * D]."""
        return attend(query, key_cache, value_cache, self, scale, sinks)


class ReferenceAttention:
    """The backend of this module."""

    name = "the reference"
    finite_keys = False

    def plan(
        self, spans: QuerySpans, shape: CacheShape, device: torch.device
    ) -> Sequence[PlannedBatch]:
        rows, starts, counts, tables, besides = spans
        if counts is None:
            return plan_groups(rows[:, None], starts[:, None], None, tables, shape, device, besides)
        long = (counts > QUERY_TILE) & (shape.exact and besides is None)
        batches: list[PlannedBatch] = [
            plan_chunk(
                int(rows[span]), int(starts[span]), int(counts[span]), tables[span], shape,
                _MAX_TILE_ELEMENTS[device.type],
            )
            for span in np.flatnonzero(long)
        ]  # fmt: skip
        if long.all():
            return batches
        rows, starts, counts, tables = (each[~long] for each in (rows, starts, counts, tables))
        owners, offsets, real = cut(counts)
        rows, starts = rows[owners, None] + offsets, starts[owners, None] + offsets
        besides = None if besides is None else besides[owners]
        groups = plan_groups(rows, starts, real, tables[owners], shape, device, besides)
        return [*batches, *groups]


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
    besides: BoolArray | None = None,
) -> list[AttentionBatch]:
    """Plan the groups of a step that have the same number of queries.

    rows: [B, Q] row of each query in the step; positions: [B, Q]; real: [B, Q] False for padding,
    which must repeat a real query of its group; block_tables: [B, W] with W a multiple of the
    blocks of a ``KV_TILE``, every entry a valid block id, those past the context's blocks of a
    block without NaN or infinity; besides: [B, W], see ``QuerySpans``.
    """
    context = positions[:, -1] + 1 if rows.shape[1] == 1 else positions.max(axis=1) + 1
    begin = _first_seen(positions, shape, besides)
    longest = int(context.max())
    tile = KV_TILE if shape.exact else _wide_tile(longest - begin, shape.block_size)
    if int(context.min()) <= begin + (longest - begin - 1) // tile * tile:
        order = np.argsort(-context, kind="stable")
        rows, positions, context = rows[order], positions[order], context[order]
        block_tables = block_tables[order]
        real = real[order] if real is not None else None
        besides = besides[order] if besides is not None else None
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
                besides[part] if besides is not None else None,
            )
        )
    return batches


def _first_seen(positions: IntArray, shape: CacheShape, besides: BoolArray | None) -> int:
    """Where the tiles of these queries begin: a whole tile or block at or ahead of the first
    position that any of them sees."""
    if not shape.local or besides is not None:
        return 0
    first = int(shape.first_seen(positions.min(keepdims=True)).min())
    unit = KV_TILE if shape.exact else shape.block_size
    return first // unit * unit


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
    besides: BoolArray | None,
) -> AttentionBatch:
    tiles = []
    longest = int(context.max())
    begin = _first_seen(positions, shape, besides)
    end = -(-longest // shape.block_size) * shape.block_size
    alone = positions.size == 1 and longest - begin <= tile and not shape.exact
    alone = alone and besides is None
    for start in range(begin, longest, tile):
        width = tile if shape.exact else min(tile, end - start)
        groups = slice(0, int(np.count_nonzero(context > start)))
        if shape.local:
            seen = shape.first_seen(positions[groups].min(axis=1)) < start + width
            if besides is not None:
                size = shape.block_size
                seen |= besides[groups, start // size : (start + width) // size].any(axis=1)
            if not seen.any():
                continue
            groups = slice(int(np.argmax(seen)), groups.stop)
        tiles.append(
            _plan_tile(start, width, groups, positions, block_tables, shape, alone, device, besides)
        )
    places = row_places(rows.reshape(-1), real.reshape(-1) if real is not None else None, device)
    return AttentionBatch(
        len(rows), rows.shape[1], shape.exact, shape.local, shape.softcap, places, tiles
    )


def _plan_tile(
    start: int,
    width: int,
    groups: slice,
    positions: IntArray,
    block_tables: IntArray,
    shape: CacheShape,
    alone: bool,
    device: torch.device,
    besides: BoolArray | None,
) -> Tile:
    """The part of some groups, in the order of ``positions`` and ``block_tables``. alone: the only
    tile of the only query."""
    positions = positions[groups]
    begin, blocks = start // shape.block_size, width // shape.block_size
    table = block_tables[groups, begin : begin + blocks]
    chosen = None if besides is None else besides[groups, begin : begin + blocks]
    if chosen is not None:
        table = _seen_blocks(table, block_tables[groups], positions, chosen, begin, shape)
    heads = np.arange(shape.num_kv_heads, dtype=np.int64)[:, None] * shape.num_blocks
    gather = torch.from_numpy((table[:, None] + heads).reshape(-1)).to(device)
    last = int(positions[-1, -1])
    first_seen = shape.first_seen(positions) if shape.local else None
    hidden = None
    later = int(positions.min()) < start + width - 1
    earlier = first_seen is not None and int(first_seen.max()) > start
    if not alone and (later or earlier):
        keys = np.arange(start, start + width, dtype=np.int64)
        behind = positions[:, :, None]
        unseen = keys > behind
        if first_seen is not None and earlier:
            ahead = keys < first_seen[:, :, None]
            if chosen is not None:
                ahead &= ~chosen.repeat(shape.block_size, axis=1)[:, None]
            unseen |= ahead
        hidden = torch.from_numpy(unseen[:, None, :, None, :]).to(device)
    first = 0 if first_seen is None else max(0, int(first_seen[-1, -1]) - start)
    return Tile(groups.start, groups.stop, width, gather, hidden, slice(first, last + 1 - start))


def _seen_blocks(
    table: IntArray,
    block_tables: IntArray,
    positions: IntArray,
    chosen: BoolArray,
    begin: int,
    shape: CacheShape,
) -> IntArray:
    """table: [B, blocks] from entry ``begin`` of the tables on. In place of a block of which no
    query of a group sees anything stands the one of its last query: nothing else is read."""
    size, numbers = shape.block_size, begin + np.arange(table.shape[1])
    last = positions.max(axis=1)
    seen = chosen | ((numbers + 1) * size > shape.first_seen(positions).min(axis=1)[:, None])
    own = block_tables[np.arange(len(table)), last // size]
    return np.where(seen & (numbers * size <= last[:, None]), table, own[:, None])


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    batches: Sequence[PlannedBatch],
    scale: float,
    sinks: Tensor | None = None,
) -> Tensor:
    """Attend with every row of a step.

    query: [N, Hq, D] (any strides); key_cache, value_cache: [Hkv, num_blocks, block_size, D] of
    the same dtype; batches: from ``AttentionBackend.plan``, of one backend or several; sinks: [Hq].
    Returns [N, Hq * D]; rows in no batch are zero.
    """
    rows, heads, dim = query.shape
    if len(batches) == 1:
        places = batches[0].places
        if places.sources is None and places.kept is None:
            first = query[: places.num_rows]
            attended = batches[0].attend(first, key_cache, value_cache, scale, sinks)
            missing = rows - places.num_rows
            return pad(attended, (0, 0, 0, missing)) if missing else attended
    out = torch.zeros(rows, heads * dim, dtype=query.dtype, device=query.device)
    for batch in batches:
        count, sources, kept, targets = batch.places
        picked = query[:count] if sources is None else query.index_select(0, sources)
        result = batch.attend(picked, key_cache, value_cache, scale, sinks)
        if kept is not None:
            result = result.index_select(0, kept)
        out.index_copy_(0, targets, result)
    return out
