"""Paged attention by torch's ``scaled_dot_product_attention``: on CUDA devices, and for chunks
on a CPU.

K and V of a batch's blocks are gathered into one tensor each, and one fused kernel attends; which
one, torch decides (FlashAttention-2 without a mask, else the memory-efficient kernel, which takes
float32 too). Rows come in two kinds of batches:

- *Folded*: decode rows, and chunks of at most ``FOLDED_ROWS`` rows. The sequences stand side by
  side, and the query heads that share K and V stand as queries of one head, so K and V are read
  once for them. A mask hides what a query does not see. Sequences are sorted by context, and one
  with less than half the longest context begins a batch of its own: at most half of what is
  gathered is padding.
- *Alone*: one longer chunk. Its KV heads stand as sequences, causal without a mask: query i of n
  sees the keys up to the n - i'th from the end, cached prefix included.

Not for results that must not depend on the batch. Unlike with the reference, hidden keys must be
finite: the mask is added to their scores.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from penstock.kernels.attention_backend import (
    CacheShape,
    IntArray,
    PlannedBatch,
    QuerySpans,
    RowPlaces,
    row_places,
)
from penstock.kernels.kv_cache import read_blocks

FOLDED_ROWS = 64
"""Longest chunk that attends beside others: as many queries as a fused kernel takes at once."""
LEAST_CUT = 256
"""Contexts up to this one stay in one batch, however much shorter some are."""
MOST_ELEMENTS = 32 * 1024 * 1024
"""Bounds the gathered keys of one call, and its mask."""


class FoldedBatch(NamedTuple):
    """Sequences side by side, with the same number of queries."""

    places: RowPlaces
    queries: int
    """Queries of each sequence; the step's rows are ordered by sequence, then query."""
    gather: Tensor
    """[sequences * Hkv * blocks] int64: rows of the cache as [Hkv * num_blocks, …]."""
    seen: int
    """The first of the gathered positions: what any query sees."""
    mask: Tensor | None
    """[sequences, 1, 1, seen] 0 or -inf in the cache's dtype, where rows of decode differ in
    context."""
    positions: Tensor | None
    """[sequences, (Hq / Hkv) * queries] int64 of the queries of chunks. Their masks are made for
    each call: those of a whole step would be too large to be kept."""

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _refuse(sinks)
        kv_heads = key_cache.shape[0]
        count, heads, dim = query.shape
        sequences, shared = count // self.queries, heads // kv_heads
        gathered = (
            read_blocks(cache, self.gather, query.dtype) for cache in (key_cache, value_cache)
        )
        key, value = (
            part.view(sequences, kv_heads, -1, dim)[:, :, : self.seen] for part in gathered
        )
        apart = query.reshape(sequences, self.queries, kv_heads, shared, dim)
        folded = apart.permute(0, 2, 3, 1, 4).reshape(sequences, kv_heads, -1, dim)
        mask = self.mask if self.positions is None else visible(self.positions, self.seen)
        attended = scaled_dot_product_attention(folded, key, value, mask, scale=scale)
        attended = attended.reshape(sequences, kv_heads, shared, self.queries, dim)
        return attended.permute(0, 3, 1, 2, 4).reshape(count, heads * dim)


class LoneChunk(NamedTuple):
    """One chunk, its KV heads a few at a time if its context is long."""

    places: RowPlaces
    gather: Tensor
    """[Hkv, blocks] int64, as in ``FoldedBatch``."""
    context: int
    """Keys that the last of the queries sees."""
    heads_at_once: int

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        _refuse(sinks)
        kv_heads = key_cache.shape[0]
        count, heads, dim = query.shape
        shared = heads // kv_heads
        apart = query.reshape(count, kv_heads, shared, dim).permute(1, 2, 0, 3)
        out = query.new_empty(count, kv_heads, shared, dim)
        for first in range(0, kv_heads, self.heads_at_once):
            some = slice(first, first + self.heads_at_once)
            rows = self.gather[some]
            key, value = (
                read_blocks(cache, rows.reshape(-1), query.dtype)
                .view(len(rows), 1, -1, dim)[:, :, : self.context]
                .expand(-1, shared, -1, -1)
                for cache in (key_cache, value_cache)
            )
            attended = causal_attention(apart[some], key, value, scale)
            out[:, some] = attended.permute(2, 0, 1, 3)
        return out.view(count, heads * dim)


def _refuse(sinks: Tensor | None) -> None:
    if sinks is not None:
        raise ValueError(f"{SdpaAttention.name} has no sinks")


def visible(positions: Tensor, width: int) -> Tensor:
    """positions: [B, M] of queries. Returns [B, 1, M, width] bool: the keys that each one sees."""
    return torch.arange(width, device=positions.device) <= positions[:, None, :, None]


def causal_attention(query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """query: [B, H, n, D]; key, value: [B, H, m, D], n <= m. Query i sees keys 0 … m - n + i.
    Returns [B, H, n, D]."""
    queries, keys = query.shape[2], key.shape[2]
    if query.is_cuda:
        from torch.nn.attention.bias import causal_lower_right

        bias = causal_lower_right(queries, keys)
        return scaled_dot_product_attention(query, key, value, bias, scale=scale)
    if queries == keys:
        return scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale)
    mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril_(keys - queries)
    return scaled_dot_product_attention(query, key, value, mask, scale=scale)


class SdpaAttention:
    """The backend of this module."""

    name = "torch's SDPA"
    finite_keys = True

    def __init__(self) -> None:
        # cuDNN makes a plan for every new shape, and each decode step may have a new one.
        torch.backends.cuda.enable_cudnn_sdp(False)
        if torch.cuda.is_available():
            # It imports torch's compiler, which takes seconds: here no request waits for it, and
            # where only a CPU computes, nobody.
            import_module("torch.nn.attention.bias")

    def plan(
        self, spans: QuerySpans, shape: CacheShape, device: torch.device
    ) -> Sequence[PlannedBatch]:
        rows, starts, counts, tables, _ = spans
        if counts is None:
            counts = np.ones_like(rows)
        batches: list[PlannedBatch] = []
        for part in _parts(starts + counts, counts, shape):
            if len(part) == 1 and counts[part[0]] > 1:
                row, start, count = (int(column[part[0]]) for column in (rows, starts, counts))
                batches.append(_plan_alone(row, start, count, tables[part[0]], shape, device))
            else:
                batches.append(
                    _plan_folded(
                        rows[part], starts[part], counts[part], tables[part], shape, device
                    )
                )
        return batches


def _parts(context: IntArray, counts: IntArray, shape: CacheShape) -> Iterator[IntArray]:
    """Indices of the spans of each batch, those with the longest context first."""
    long = counts > FOLDED_ROWS
    yield from np.flatnonzero(long)[:, None]
    short = np.flatnonzero(~long)
    rest = short[np.argsort(-context[short], kind="stable")]
    shared = shape.num_query_heads // shape.num_kv_heads
    while len(rest):
        longest = int(context[rest[0]])
        alike = len(rest)
        if longest > LEAST_CUT:
            alike = int(np.count_nonzero(2 * context[rest] >= longest))
        width = -(-longest // shape.block_size) * shape.block_size
        queries = int(counts[rest[:alike]].max())
        across = max(shape.num_kv_heads * shape.head_dim, shared * queries)
        taken = max(1, min(alike, MOST_ELEMENTS // (width * across)))
        yield rest[:taken]
        rest = rest[taken:]


def _plan_folded(
    rows: IntArray,
    starts: IntArray,
    counts: IntArray,
    block_tables: IntArray,
    shape: CacheShape,
    device: torch.device,
) -> FoldedBatch:
    queries = int(counts.max())
    inside = np.arange(queries, dtype=np.int64)
    offsets = np.minimum(inside, counts[:, None] - 1)
    real = (inside < counts[:, None]).reshape(-1)
    places = row_places((rows[:, None] + offsets).reshape(-1), real, device)
    context = starts + counts
    longest = int(context.max())
    blocks = -(-longest // shape.block_size)
    gather = _cache_rows(block_tables[:, :blocks], shape, device).reshape(-1)
    if queries == 1 and int(context.min()) == longest:
        return FoldedBatch(places, 1, gather, longest, None, None)
    positions = torch.from_numpy(starts[:, None] + offsets).to(device)
    width = blocks * shape.block_size
    if queries > 1:
        folded = positions.repeat(1, shape.num_query_heads // shape.num_kv_heads)
        return FoldedBatch(places, queries, gather, width, None, folded)
    hidden = ~visible(positions, width)
    mask = torch.zeros(hidden.shape, dtype=shape.dtype, device=device)
    return FoldedBatch(places, 1, gather, width, mask.masked_fill_(hidden, -torch.inf), None)


def _plan_alone(
    row: int,
    start: int,
    count: int,
    block_table: IntArray,
    shape: CacheShape,
    device: torch.device,
) -> LoneChunk:
    context = start + count
    blocks = -(-context // shape.block_size)
    gather = _cache_rows(block_table[None, :blocks], shape, device)[0]
    at_once = MOST_ELEMENTS // (blocks * shape.block_size * shape.head_dim)
    places = row_places(np.arange(row, row + count, dtype=np.int64), None, device)
    return LoneChunk(places, gather, context, max(1, at_once))


def _cache_rows(tables: IntArray, shape: CacheShape, device: torch.device) -> Tensor:
    """tables: [B, blocks]. Returns [B, Hkv, blocks] rows of the cache as [Hkv * num_blocks, …]."""
    heads = np.arange(shape.num_kv_heads, dtype=np.int64)[:, None] * shape.num_blocks
    return torch.from_numpy(tables[:, None] + heads).to(device)
