"""Exact attention of one longer prefill chunk on the CPU: a row has the bits that the groups of
``attention.py`` give it, in fewer and larger products.

The rows are cut into *pieces* of consecutive queries. All query heads of a piece that share a KV
head are rows of one product, a few KV heads at a time: as many rows as leave the scores of one key
tile in the cache. A piece goes through the key tiles in ascending order, and in each only the
queries that see some of it take part, so larger pieces compute no more scores. Scores, weights and
sums are formed in place. The keys of a chunk are gathered once, unless the context is so long that
they are gathered for each piece, some tiles at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.attention_backend import CacheShape, IntArray, RowPlaces, row_places
from penstock.kernels.kv_cache import read_blocks_into
from penstock.kernels.online_softmax import LOWEST, SoftmaxSums, add_tile, weight_of
from penstock.kernels.powers_of_two import LOG2_E

KV_TILE = 128
"""Key positions in one product of an exact batch. A multiple of every block size."""
ROW_MULTIPLE = 4
"""Rows of an exact product: a multiple of it."""
PIECE_ROWS = 2304
"""Rows of one product, those of all its KV heads, at most where queries are several: the scores of
a tile take 1.2 MB. Half as many were measured to be 5 % slower, and a quarter 10 %."""
MOST_QUERIES = 512
"""Queries of a piece at most. With fewer, a long chunk's product is of several KV heads, each of
which one thread computes: two threads take a third longer for three heads than for one of as many
rows."""


class SeenTile(NamedTuple):
    """A key tile, and which queries of a piece see some of it."""

    start: int
    """Its first position, a multiple of ``KV_TILE``."""
    first: int
    end: int
    """Queries ``first`` to ``end`` - 1 of the piece, multiples of ``ROW_MULTIPLE``."""
    hidden: Tensor | None
    """[queries, 1, KV_TILE] bool: keys that the first of these queries do not see; ``None``: they
    see all, as do the queries behind those in ``hidden``."""


class Piece(NamedTuple):
    """Consecutive queries of a chunk."""

    first: int
    """The first one's place in the chunk."""
    queries: int
    padded: int
    """Their number, filled up to a multiple of ``ROW_MULTIPLE``."""
    tiles: list[SeenTile]


class ExactChunk(NamedTuple):
    """A chunk's rows, planned on the host once for all layers."""

    places: RowPlaces
    pieces: list[Piece]
    start: int
    """The first position that is seen of the cache, a multiple of ``KV_TILE``."""
    gather: Tensor
    """[Hkv, blocks] int64: rows of the cache as [Hkv * num_blocks, …], whole tiles from there."""
    heads_at_once: int
    """KV heads of one product."""
    tiles_at_once: int
    """Key tiles that are gathered together."""
    softcap: float

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        scale: float,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """query: [rows, Hq, D]. Returns [rows, Hq * D]."""
        kv_heads = key_cache.shape[0]
        rows, heads, dim = query.shape
        apart = query.view(rows, kv_heads, heads // kv_heads, dim)
        of_heads = None if sinks is None else sinks.float().view(kv_heads, 1, -1, 1) * LOG2_E
        out = torch.empty_like(apart, memory_format=torch.contiguous_format)
        for first in range(0, kv_heads, self.heads_at_once):
            some = slice(first, first + self.heads_at_once)
            keys = _Keys(key_cache, value_cache, dim, self, some)
            scores = _score_memory(apart[:, some], self.pieces)
            for piece in self.pieces:
                inside = slice(piece.first, piece.first + piece.queries)
                sums = self._attend_piece(piece, apart[inside, some], keys, scale, scores)
                attended, row_sum = (
                    part.view(len(part), piece.padded, -1, part.shape[-1])[:, : piece.queries]
                    for part in (sums.attended, sums.row_sum)
                )
                if of_heads is not None:
                    row_max = sums.row_max.view(len(attended), piece.padded, -1, 1)
                    sink = of_heads[some] - row_max[:, : piece.queries]
                    row_sum = row_sum + weight_of(sink, powers=True)
                into = out[inside, some]
                torch.div(attended.transpose(0, 1), row_sum.transpose(0, 1), out=into)
            del keys  # its memory is for those of the next heads
        return out.view(rows, heads * dim)

    def _attend_piece(
        self, piece: Piece, query: Tensor, keys: _Keys, scale: float, scores: Tensor
    ) -> SoftmaxSums:
        """query: [count, KV heads, Hq / Hkv, D]; scores: memory for those of a tile."""
        kv_heads, shared = query.shape[1:3]
        packed = _packed(query, piece.padded, scale * LOG2_E)
        sums = SoftmaxSums(
            packed.new_full((*packed.shape[:2], 1), LOWEST),
            packed.new_zeros((*packed.shape[:2], 1)),
            torch.zeros_like(packed),
        )
        for tile, key, value in keys.tiles(piece.tiles):
            active = slice(tile.first * shared, tile.end * shared)
            rows = (tile.end - tile.first) * shared
            found = scores[: kv_heads * rows * KV_TILE].view(kv_heads, rows, KV_TILE)
            torch.bmm(packed[:, active], key.transpose(1, 2), out=found)
            if self.softcap:
                cap = self.softcap * LOG2_E
                found.div_(cap).tanh_().mul_(cap)
            if tile.hidden is not None:
                masked = found.view(kv_heads, -1, shared, KV_TILE)[:, : len(tile.hidden)]
                masked.masked_fill_(tile.hidden, -torch.inf)
            add_tile(SoftmaxSums(*(part[:, active] for part in sums)), found, value, powers=True)
        return sums


class _Keys:
    """Keys and values of some KV heads, gathered at once or some tiles at a time."""

    def __init__(
        self, key_cache: Tensor, value_cache: Tensor, dim: int, chunk: ExactChunk, heads: slice
    ) -> None:
        self._block_size = key_cache.shape[2]
        self._caches = key_cache, value_cache
        self._dim = dim
        self._start, self._gather = chunk.start, chunk.gather[heads]
        self._width = chunk.tiles_at_once * KV_TILE
        self._begin = -1
        """The first of the gathered positions, from the chunk's ``start`` on."""
        count, blocks = self._gather.shape
        most = count * min(self._width, blocks * self._block_size) * self._dim
        self._memory = [torch.empty(most, dtype=torch.float32) for _ in self._caches]
        self._gathered: list[Tensor] = []

    def tiles(self, seen: list[SeenTile]) -> Iterator[tuple[SeenTile, Tensor, Tensor]]:
        """Each with its keys and values, [KV heads, KV_TILE, D]."""
        for tile in seen:
            at = tile.start - self._start
            begin = at // self._width * self._width
            if begin != self._begin:
                self._begin, self._gathered = begin, self._read(begin)
            inside = slice(at - begin, at - begin + KV_TILE)
            key, value = (part[:, inside] for part in self._gathered)
            yield tile, key, value

    def _read(self, begin: int) -> list[Tensor]:
        size = self._block_size
        rows = self._gather[:, begin // size : (begin + self._width) // size]
        heads, blocks = rows.shape
        rows = rows.reshape(-1)
        found = []
        for cache, memory in zip(self._caches, self._memory, strict=True):
            into = memory[: len(rows) * size * self._dim].view(len(rows), size, self._dim)
            read_blocks_into(cache, rows, into)
            found.append(into.view(heads, blocks * size, self._dim))
        return found


def _score_memory(query: Tensor, pieces: list[Piece]) -> Tensor:
    """For the scores of a tile. query: [rows, KV heads, Hq / Hkv, D]."""
    queries = max(piece.padded for piece in pieces)
    return query.new_empty(query.shape[1] * queries * query.shape[2] * KV_TILE)


def _packed(query: Tensor, padded: int, scale: float) -> Tensor:
    """query: [count, KV heads, Hq / Hkv, D]. Returns [KV heads, padded * Hq / Hkv, D], zeros behind
    the rows of the queries."""
    count, kv_heads, shared, dim = query.shape
    packed = query.new_empty(kv_heads, padded, shared, dim)
    torch.mul(query.transpose(0, 1), scale, out=packed[:, :count])
    packed[:, count:] = 0.0
    return packed.view(kv_heads, padded * shared, dim)


def plan_chunk(
    row: int,
    start: int,
    count: int,
    block_table: IntArray,
    shape: CacheShape,
    most_elements: int,
) -> ExactChunk:
    """A span of ``count`` rows from ``row`` on, at positions from ``start`` on.

    block_table: [W] as in ``QuerySpans``; most_elements: bounds the keys that are gathered at once.
    """
    shared = shape.num_query_heads // shape.num_kv_heads
    pieces = [
        _plan_piece(start, first, end, shape)
        for first, end in _cut(start, start + count, _piece_queries(shared))
    ]
    largest = max(piece.padded for piece in pieces)
    heads_at_once = min(shape.num_kv_heads, max(1, PIECE_ROWS // (largest * shared)))
    seen = pieces[0].tiles[0].start
    width = KV_TILE // shape.block_size
    blocks = slice(seen // shape.block_size, -(-(start + count) // KV_TILE) * width)
    heads = np.arange(shape.num_kv_heads, dtype=np.int64)[:, None] * shape.num_blocks
    places = row_places(np.arange(row, row + count, dtype=np.int64), None, torch.device("cpu"))
    at_once = most_elements // (KV_TILE * heads_at_once * shape.head_dim)
    return ExactChunk(
        places, pieces, seen, torch.from_numpy(block_table[blocks] + heads), heads_at_once,
        max(1, at_once), shape.softcap,
    )  # fmt: skip


def _piece_queries(shared: int) -> int:
    """Queries of a piece, whose rows of one KV head are no more than ``PIECE_ROWS``, whole tiles if
    there are so many; shared: query heads of a KV head."""
    most = PIECE_ROWS // shared
    whole = min(MOST_QUERIES, most // KV_TILE * KV_TILE)
    return whole or (64 if most >= 64 else 32)


def _cut(start: int, end: int, queries: int) -> Iterator[tuple[int, int]]:
    """Positions of pieces: cut at multiples of ``queries``, so that few tiles need masks."""
    while start < end:
        stop = end if end - start <= queries else start // queries * queries + queries
        yield start, stop
        start = stop


def _plan_piece(start: int, first: int, end: int, shape: CacheShape) -> Piece:
    """Positions ``first`` to ``end`` - 1 of a chunk that starts at ``start``."""
    count = end - first
    padded = -(-count // ROW_MULTIPLE) * ROW_MULTIPLE
    positions = np.minimum(np.arange(first, first + padded, dtype=np.int64), end - 1)
    begins = shape.first_seen(positions)
    tiles = []
    for at in range(int(begins[0]) // KV_TILE * KV_TILE, end, KV_TILE):
        one = max(0, at - first) // ROW_MULTIPLE * ROW_MULTIPLE
        # The first position that a query sees never falls from one to the next.
        seeing = int(np.searchsorted(begins, at + KV_TILE))
        stop = -(-seeing // ROW_MULTIPLE) * ROW_MULTIPLE
        if one < stop:
            hidden = _hidden(at, positions[one:stop], begins[one:stop])
            tiles.append(SeenTile(at, one, stop, hidden))
    return Piece(first - start, count, padded, tiles)


def _hidden(at: int, positions: IntArray, begins: IntArray) -> Tensor | None:
    """What queries at these positions do not see of the tile at ``at``; begins: the first position
    that each sees."""
    masked = (positions < at + KV_TILE - 1) | (begins > at)
    if not masked.any():
        return None
    last = int(np.flatnonzero(masked)[-1]) + 1
    keys = np.arange(at, at + KV_TILE, dtype=np.int64)
    hidden = (keys > positions[:last, None]) | (keys < begins[:last, None])
    return torch.from_numpy(hidden[:, None])
