"""Attention that gives a row the same bits whether it is decoded, or prefilled in any chunk.

A program attends for a few queries of one sequence, all query heads of one KV head, and reads the
keys from position 0 on in tiles of the same size, however long the context is and whatever else
the step has: a row's sums have one order. One compiled kernel serves decode rows, as tiles of one
query, and chunks. Keys behind a query's own position weigh exactly 0 in its sums, so it does not
matter which queries share its tile.

The price: a long context of few sequences is not divided among programs.

Reference: ``penstock.kernels.attention``.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import DecodeBatch, LayerCache, padded_half
from penstock.kernels.gpu.device_functions import dot, softmax_step, within
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.prefill_attention import QUERY_TILE

_ROWS = 16
"""Of a product of tensor cores: queries times query heads of a KV head."""
_LARGEST_HEAD = 256
"""Bytes of a key up to which tiles have 64 of them."""
_BLOCK = 128
_COMPARED = tl.constexpr(32)


@triton.jit
def _rank(decode_rows, last_position, num_decode, row, position, BLOCK: tl.constexpr):
    """How many decode rows have fewer positions than ``row``, [BLOCK], or as many and come before
    it."""
    rank = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_decode, _COMPARED):
        other = start + tl.arange(0, _COMPARED)
        slot = tl.load(decode_rows + other, mask=other < num_decode, other=-1)
        length = tl.load(last_position + slot, mask=slot >= 0, other=0)
        shorter = length[None, :] < position[:, None]
        earlier = (length[None, :] == position[:, None]) & (other[None, :] < row[:, None])
        counts = (shorter | earlier) & (other < num_decode)[None, :]
        rank += tl.sum(counts.to(tl.int32), 1)
    return rank


@triton.jit(do_not_specialize=["num_decode", "num_tiles", "rows"])
def _place_kernel(
    decode_rows, last_position, chunk_slots, chunk_positions, slots, positions, tiles, num_decode,
    num_tiles, rows, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(decode_rows + row, mask=row < num_decode, other=-1)
    decoding = slot >= 0
    position = tl.load(last_position + slot, mask=decoding, other=0)
    inside = row < num_decode
    place = tiles + _rank(decode_rows, last_position, num_decode, row, position, BLOCK)
    tl.store(place, row, mask=inside)
    tl.store(place + num_tiles, decoding.to(tl.int32), mask=inside)
    tl.store(place + 2 * num_tiles, slot, mask=inside)
    tl.store(place + 3 * num_tiles, position, mask=inside)
    if chunk_slots is not None:
        chunked = (row < rows) & (slot < 0)
        slot = tl.where(decoding, slot, tl.load(chunk_slots + row, mask=chunked, other=-1))
        other = tl.load(chunk_positions + row, mask=chunked, other=0)
        position = tl.where(decoding, position, other)
    tl.store(slots + row, slot, mask=row < rows)
    tl.store(positions + row, position, mask=row < rows)


def place_rows(
    batch: DecodeBatch,
    chunks: tuple[Tensor, Tensor] | None,
    slots: Tensor,
    positions: Tensor,
    tiles: Tensor,
) -> None:
    """Say of each row of a step where it belongs: a decode row to its slot's next position, another
    one to where its chunk has it.

    batch: the decode rows, which come first; chunks: slots, -1 for what is no row of a chunk, and
    positions, [at least N] int32 each; slots, positions: [N] int32, written; tiles: [4, at least
    the decode rows] int32, written: see ``prefill_attention``, one for each decode row, those with
    the most positions last: programs of the last tiles begin first.
    """
    rows = len(slots)
    chunk_slots, chunk_positions = chunks or (None, None)
    if rows:
        _place_kernel[(triton.cdiv(max(rows, len(batch.rows)), _BLOCK),)](
            batch.rows, batch.last_position, chunk_slots, chunk_positions, slots, positions, tiles,
            len(batch.rows), tiles.shape[1], rows, _BLOCK, EARLY, num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_tiles", "pieces"])
def _fixed_attention_kernel(
    queries, tiles, table, key_cache, value_cache, out, scale, table_stride, num_tiles, pieces,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """pieces: programs of a tile of ``QUERY_TILE`` queries; GROUP: query heads of a KV head, filled
    up to a power of two."""
    begin_early(EARLY)
    # The last tiles come first: they have the most work, and those that begin late end soon.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1)
    tile = index // pieces
    first = index % pieces * (ROWS // GROUP)
    count = tl.load(tiles + num_tiles + tile) - first
    if count > 0:
        count = tl.minimum(count, ROWS // GROUP)
        first_row = tl.load(tiles + tile) + first
        slot = tl.load(tiles + 2 * num_tiles + tile).to(tl.int64)
        first_position = tl.load(tiles + 3 * num_tiles + tile) + first
        token = tl.arange(0, ROWS) // GROUP
        member = tl.arange(0, ROWS) % GROUP
        head = kv_head * (HEADS // KV_HEADS) + member
        column = tl.arange(0, PADDED)[None, :]
        inside = ((token < count) & (member < HEADS // KV_HEADS))[:, None]
        inside = within(inside, column, DIM, PADDED)
        at = (((first_row + token).to(tl.int64) * HEADS + head) * DIM)[:, None] + column
        query = tl.load(queries + at, mask=inside, other=0.0)
        positions = first_position + token
        limit = first_position + count
        entries = table + slot * table_stride
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
        accumulator = tl.zeros([ROWS, PADDED], tl.float32)
        for start in range(0, limit, KEYS):
            position = start + tl.arange(0, KEYS)
            known = position < limit
            block = tl.load(entries + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
            place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * DIM
            there = within(known[:, None], column, DIM, PADDED)
            key = tl.load(key_cache + place[:, None] + column, mask=there, other=0.0)
            value = tl.load(value_cache + place[:, None] + column, mask=there, other=0.0)
            score = dot(query, tl.trans(key))
            score = tl.where(position[None, :] <= positions[:, None], score, float("-inf"))
            row_max, row_sum, accumulator = softmax_step(
                score, value, row_max, row_sum, accumulator, scale
            )
        result = accumulator / row_sum[:, None]
        tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


def _shape(head_bytes: int) -> tuple[int, int, int]:
    """Keys of a tile, warps of 16 rows, and stages, for keys of so many bytes: the same for all of
    a model's steps, because they decide the order of sums. The first is on an H200 as fast as nine
    others with 256 rows of 64 to 1,198 positions, and one row of 1,000 takes 28 µs, 37 with the
    other."""
    return (64, 4, 3) if head_bytes <= _LARGEST_HEAD else (32, 1, 5)


def fixed_attention(
    queries: Tensor,
    tiles: Tensor,
    num_tiles: int,
    table: Tensor,
    cache: LayerCache,
    out: Tensor,
    score_scale: float,
    most: int = QUERY_TILE,
) -> None:
    """The arguments are those of ``prefill_attention``, for scores that are only scaled, by
    ``score_scale`` times log2(e). most: queries of a tile."""
    _, heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    if not num_tiles:
        return
    group = triton.next_power_of_2(heads // kv_heads)
    rows = max(_ROWS, group)
    pieces = triton.cdiv(most, rows // group)
    keys, warps, stages = _shape(dim * queries.element_size())
    _fixed_attention_kernel[(num_tiles * pieces, kv_heads)](
        queries, tiles, table, cache.keys, cache.values, out, score_scale, table.stride(0),
        tiles.shape[1], pieces, heads, kv_heads, dim, 2 * padded_half(dim), block_size, rows, group,
        keys, EARLY, num_warps=warps * rows // _ROWS, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
