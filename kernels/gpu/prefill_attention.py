"""Causal attention of prefill chunks over the paged KV cache, cached prefixes included.

A chunk's queries are cut into tiles; one program computes one tile of one query head over all
positions up to each query's own, with the online softmax as in FlashAttention-2 (Dao, 2023). The
keys and values are read through the block table, so a cached prefix and the chunk's own positions
(which ``rope_and_cache`` has written before) are alike. Reference: ``penstock.kernels.attention``.

Bound by arithmetic: 4 D operations for each pair of query and key.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    LayerCache,
    ListedBlocks,
    Scores,
    padded_half,
)
from penstock.kernels.gpu.cache_codes import codes_place, operand, scale_place, values_for
from penstock.kernels.gpu.device_facts import shared_bytes
from penstock.kernels.gpu.device_functions import (
    LOWEST,
    capped,
    count_below,
    dot,
    first_seen,
    softmax_step,
    with_sink,
    within,
)
from penstock.kernels.gpu.early_launch import EARLY, begin_early

QUERY_TILE = 128
# By (head size, bytes of a number): keys in a tile, warps, loads in flight. The first of each was
# the fastest of eleven on an H200 (heads of 128, bf16); the second fits in 99 KB of shared memory.
_LARGE = {
    (32, 2): (64, 4, 3), (64, 2): (64, 4, 3), (128, 2): (128, 8, 3), (256, 2): (32, 8, 2),
    (32, 4): (64, 4, 2), (64, 4): (64, 4, 2), (128, 4): (32, 8, 2), (256, 4): (16, 8, 1),
}  # fmt: skip
_SMALL = {
    (32, 2): (64, 4, 2), (64, 2): (64, 4, 2), (128, 2): (32, 8, 2), (256, 2): (16, 8, 1),
    (32, 4): (32, 4, 2), (64, 4): (32, 4, 1), (128, 4): (16, 8, 1),
}  # fmt: skip
_LARGE_BYTES = 220 * 1024
"""Shared memory of a program that ``_LARGE`` needs: compute capability 9.0 and 10.0 have it."""


@triton.jit
def _tile_of_keys(
    query, row_max, row_sum, accumulator, entries, key_cache, value_cache, key_scales, value_scales,
    kv_head, start, limit, positions, scale, listed,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr, MASKED: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAP: tl.constexpr, LISTED: tl.constexpr = False,
):  # fmt: skip
    """Add the keys of positions ``start`` … below ``limit``. LISTED: both count through those of
    the blocks ``listed``, of which a query sees what lies ahead of its window or chunk."""
    position = start + tl.arange(0, KEYS)
    column = tl.arange(0, PADDED)
    if LISTED:
        inside = position < limit
        number = tl.load(listed + position // BLOCK_SIZE, mask=inside, other=0)
        position = number * BLOCK_SIZE + position % BLOCK_SIZE
        block = tl.load(entries + number, mask=inside, other=0).to(tl.int64)
    elif MASKED:
        inside = position < limit
        block = tl.load(entries + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    else:
        block = tl.load(entries + position // BLOCK_SIZE).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, position % BLOCK_SIZE
    if key_scales is not None:
        place = codes_place(page, offset, DIM, BLOCK_SIZE)
    else:
        place = (page * BLOCK_SIZE + offset) * DIM
    at = place[:, None] + column[None, :]
    if MASKED or DIM != PADDED:
        there = inside[:, None] if LISTED else (position < limit)[:, None]
        there = within(there, column[None, :], DIM, PADDED)
        key = tl.load(key_cache + at, mask=there, other=0.0)
        value = tl.load(value_cache + at, mask=there, other=0.0)
    else:
        key = tl.load(key_cache + at)
        value = tl.load(value_cache + at)
    if key_scales is not None:
        of_scales = scale_place(page, offset, DIM, BLOCK_SIZE)
        known = position < limit if not LISTED else inside
        score = dot(query, tl.trans(operand(key, query)))
        score = score * tl.load(key_scales + of_scales, mask=known, other=0.0)[None, :]
        of_codes = tl.load(value_scales + of_scales, mask=known, other=0.0)
        value, value_scale = values_for(value, of_codes, query)
    else:
        score = dot(query, tl.trans(key))
        value_scale = None
    if CAP != 0.0:
        score = capped(score, scale, CAP)
        scale = 1.0
    if LISTED:
        ahead = position[None, :] < first_seen(positions, WINDOW, CHUNK)[:, None]
        score = tl.where(ahead & inside[None, :], score, float("-inf"))
    elif MASKED:
        seen = position[None, :] <= positions[:, None]
        if WINDOW:
            seen = seen & (position[None, :] > positions[:, None] - WINDOW)
        if CHUNK:
            seen = seen & (position[None, :] >= (positions // CHUNK * CHUNK)[:, None])
        score = tl.where(seen, score, float("-inf"))
    return softmax_step(score, value, row_max, row_sum, accumulator, scale, value_scale)


@triton.jit(do_not_specialize=["max_tiles", "listed_stride", "most_listed"])
def _prefill_kernel(
    queries, tiles, table, key_cache, value_cache, key_scales, value_scales, out, sinks, listed,
    listed_stride, most_listed, scale, table_stride, max_tiles,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WINDOW: tl.constexpr,
    CHUNK: tl.constexpr, CAP: tl.constexpr, LISTED_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    # Heads side by side share keys and values; the last tiles come first.
    head = tl.program_id(0)
    tile = tl.num_programs(1) - 1 - tl.program_id(1)
    count = tl.load(tiles + max_tiles + tile)
    if count == 0:
        return
    first_row = tl.load(tiles + tile)
    slot = tl.load(tiles + 2 * max_tiles + tile).to(tl.int64)
    first_position = tl.load(tiles + 3 * max_tiles + tile)
    kv_head = head // (HEADS // KV_HEADS)
    row = tl.arange(0, ROWS)
    column = tl.arange(0, PADDED)
    at = ((first_row + row).to(tl.int64) * HEADS + head) * DIM
    at = at[:, None] + column[None, :]
    inside = within((row < count)[:, None], column[None, :], DIM, PADDED)
    query = tl.load(queries + at, mask=inside, other=0.0)
    positions = first_position + row
    limit = first_position + count
    entries = table + slot * table_stride
    row_sum = tl.zeros([ROWS], tl.float32)
    accumulator = tl.zeros([ROWS, PADDED], tl.float32)
    # Tiles that every query sees whole need no mask.
    begin = 0
    whole = (first_position + 1) // KEYS * KEYS
    if WINDOW or CHUNK:
        row_max = tl.full([ROWS], LOWEST, tl.float32)
        # Not ahead of the first block that is seen: those may be another sequence's by now.
        unit: tl.constexpr = min(KEYS, BLOCK_SIZE)
        begin = first_seen(first_position, WINDOW, CHUNK) // unit * unit
        whole = begin + (first_position + 1 - begin) // KEYS * KEYS
        seen_by_all = first_seen(limit - 1, WINDOW, CHUNK)
        edge = tl.minimum(begin + tl.cdiv(seen_by_all - begin, KEYS) * KEYS, whole)
        if LISTED_BITS:
            listed += slot * listed_stride
            bound = tl.cdiv(seen_by_all, BLOCK_SIZE)
            ahead = count_below(listed, most_listed, bound, LISTED_BITS) * BLOCK_SIZE
            for start in range(0, ahead, KEYS):
                row_max, row_sum, accumulator = _tile_of_keys(
                    query, row_max, row_sum, accumulator, entries, key_cache, value_cache,
                    key_scales, value_scales, kv_head, start, ahead, positions, scale, listed,
                    KV_HEADS, DIM, PADDED, BLOCK_SIZE, KEYS, True, WINDOW, CHUNK, CAP, True,
                )  # fmt: skip
        for start in range(begin, edge, KEYS):
            row_max, row_sum, accumulator = _tile_of_keys(
                query, row_max, row_sum, accumulator, entries, key_cache, value_cache,
                key_scales, value_scales, kv_head, start, limit, positions, scale, listed,
                KV_HEADS, DIM, PADDED, BLOCK_SIZE, KEYS, True, WINDOW, CHUNK, CAP,
            )  # fmt: skip
        begin = edge
    else:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
    for start in range(begin, whole, KEYS):
        row_max, row_sum, accumulator = _tile_of_keys(
            query, row_max, row_sum, accumulator, entries, key_cache, value_cache, key_scales,
            value_scales, kv_head, start, limit, positions, scale, listed,
            KV_HEADS, DIM, PADDED, BLOCK_SIZE, KEYS, False, WINDOW, CHUNK, CAP,
        )  # fmt: skip
    for start in range(whole, limit, KEYS):
        row_max, row_sum, accumulator = _tile_of_keys(
            query, row_max, row_sum, accumulator, entries, key_cache, value_cache, key_scales,
            value_scales, kv_head, start, limit, positions, scale, listed,
            KV_HEADS, DIM, PADDED, BLOCK_SIZE, KEYS, True, WINDOW, CHUNK, CAP,
        )  # fmt: skip
    if sinks is not None:
        sink = tl.load(sinks + head)
        row_max, row_sum, accumulator = with_sink(sink, row_max, row_sum, accumulator)
    result = accumulator / row_sum[:, None]
    tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def shape_for(dim: int, itemsize: int, shared_bytes: int) -> tuple[int, int, int] | None:
    """Keys in a tile, warps and loads in flight, for heads of ``dim`` numbers of ``itemsize``
    bytes, where a program may have so much shared memory. ``None``: it does not fit."""
    shapes = _LARGE if shared_bytes >= _LARGE_BYTES else _SMALL
    return shapes.get((2 * padded_half(dim), itemsize))


class PrefillConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    dim: int
    padded: int
    """It, filled up to a power of two."""
    block_size: int
    rows: int
    """Queries of a tile."""
    keys: int
    window: int
    chunk: int
    cap: float
    """Soft cap of scores, times log2(e); 0: none."""
    listed_bits: int
    """0: no blocks are listed."""
    early: bool


def prefill_attention(
    queries: Tensor,
    tiles: Tensor,
    num_tiles: int,
    table: Tensor,
    cache: LayerCache,
    out: Tensor,
    scores: Scores | None = None,
    sinks: Tensor | None = None,
    listed: ListedBlocks = NOTHING_LISTED,
) -> None:
    """queries, out: [N, Hq, D], queries normed and rotated; tiles: [4, T] int32: first row, number
    of rows (at most ``QUERY_TILE``; 0: no tile), slot, position of the first row; num_tiles: how
    many of them to look at, in any order, but fastest with the most work last; table: [S, W] int32;
    scores: by default scaled by 1 / sqrt(D); sinks: [Hq], one score more for each head, which
    stands for no value; listed: blocks that queries see besides. Rows of no tile are not written.
    """
    _, heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    if not num_tiles:
        return
    shape = shape_for(dim, queries.element_size(), shared_bytes())
    if shape is None:
        raise ValueError(f"heads of {dim} numbers do not fit this device's shared memory")
    keys, warps, stages = shape
    made = scores or Scores(dim**-0.5)
    scale, cap = made.in_binary
    constants = PrefillConstants(
        heads, kv_heads, dim, 2 * padded_half(dim), block_size, QUERY_TILE, keys, made.window,
        made.chunk, cap, listed.bits if made.local else 0, EARLY,
    )  # fmt: skip
    _prefill_kernel[(heads, num_tiles)](
        queries, tiles, table, *cache, out, sinks, *listed, scale, table.stride(0),
        tiles.shape[1], *constants, num_warps=warps, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
