"""Attention that gives a row the same bits whether it is decoded, or prefilled in any chunk.

A program attends for a few queries of one sequence, all query heads of one KV head, and reads keys
in tiles of the same size. Those of ``PART`` positions, from position 0 on, are summed one after the
other, and then the sums of these parts, whatever else the step has: a row's sums have one order.
Keys behind a query's own position weigh exactly 0 in its sums, so it does not matter which queries
share its tile.

Of a few decode rows the parts are divided among programs, which leave what they sum in memory, and
another kernel adds that up in the same order by the same operations. So it does not matter either
how many programs a row has.

Reference: ``penstock.kernels.attention``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import DecodeBatch, LayerCache, padded_half
from penstock.kernels.gpu.device_functions import LOWEST, dot, softmax_step, within
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.prefill_attention import QUERY_TILE

_ROWS = 16
"""Of a product of tensor cores: queries times query heads of a KV head."""
_LARGEST_HEAD = 256
"""Bytes of a key up to which tiles have 64 of them."""
PART = 512
"""Positions that are summed before what comes before is added."""
_DIVIDED, _MOST_LANES, _MOST_PARTS = 512, 16, 2048
"""Decode rows times KV heads, up to which contexts are divided among programs, those of a row, and
parts that there is memory for. One row of A's shape behind 2,000 positions takes 14 µs (51 by one
program), 16 rows take 32 (54), 64 as long as before (H200)."""
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


class PartSums(NamedTuple):
    """Memory for what programs sum of the parts of contexts."""

    weighted: Tensor
    """[rows, Hq, parts, D filled up to a power of two] fp32: values, by their weights."""
    weights: Tensor
    """[rows, Hq, parts, 2] fp32: the highest score, and the sum of weights."""


def part_sums(
    max_rows: int, heads: int, kv_heads: int, dim: int, positions: int, device: torch.device
) -> PartSums:
    """For as many of ``max_rows`` decode rows as are divided. positions: of a context, at most."""
    parts = triton.cdiv(positions, PART)
    rows = min(max_rows, _DIVIDED // kv_heads, _MOST_PARTS // parts)

    def memory(last: int) -> Tensor:
        return torch.empty(rows, heads, parts, last, dtype=torch.float32, device=device)

    return PartSums(memory(2 * padded_half(dim)), memory(2))


@triton.jit
def _add_part(total_max, total_sum, total, row_max, row_sum, accumulator):
    """Sums of parts and of the next one, by operations of which a compiler makes no others. An
    empty part, or empty sums, change no bit."""
    new_max = tl.maximum(total_max, row_max)
    kept, more = tl.exp2(total_max - new_max), tl.exp2(row_max - new_max)
    total_sum = tl.fma(total_sum, kept, row_sum * more)
    if len(total.shape) == 2:
        kept = tl.broadcast_to(kept[:, None], total.shape)
        total = tl.fma(total, kept, accumulator * more[:, None])
    else:
        total = tl.fma(total, tl.broadcast_to(kept, total.shape), accumulator * more)
    return new_max, total_sum, total


@triton.jit
def _empty(ROWS: tl.constexpr, PADDED: tl.constexpr):
    """Highest score, sum of weights and of weighted values of no key."""
    return (
        tl.full([ROWS], LOWEST, tl.float32),
        tl.zeros([ROWS], tl.float32),
        tl.zeros([ROWS, PADDED], tl.float32),
    )


@triton.jit
def _add_keys(
    query, positions, row_max, row_sum, accumulator, start, limit, entries, key_cache, value_cache,
    kv_head, scale, column,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    KEYS: tl.constexpr,
):  # fmt: skip
    """The sums with those of the next tile of keys."""
    position = start + tl.arange(0, KEYS)
    known = position < limit
    block = tl.load(entries + position // BLOCK_SIZE, mask=known, other=0).to(tl.int64)
    place = ((block * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE) * DIM
    there = within(known[:, None], column, DIM, PADDED)
    key = tl.load(key_cache + place[:, None] + column, mask=there, other=0.0)
    value = tl.load(value_cache + place[:, None] + column, mask=there, other=0.0)
    score = dot(query, tl.trans(key))
    score = tl.where(position[None, :] <= positions[:, None], score, float("-inf"))
    return softmax_step(score, value, row_max, row_sum, accumulator, scale)


@triton.jit(do_not_specialize=["num_tiles", "pieces", "most_parts"])
def _fixed_attention_kernel(
    queries, tiles, table, key_cache, value_cache, out, weighted, weights, scale, table_stride,
    num_tiles, pieces, most_parts,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, ROWS: tl.constexpr, GROUP: tl.constexpr, KEYS: tl.constexpr,
    PART: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """pieces: programs of a tile of ``QUERY_TILE`` queries; GROUP: query heads of a KV head, filled
    up to a power of two. Where there is memory for the sums of parts, a program takes every so many
    parts as the grid is deep, and writes those; else it takes all, and writes ``out``."""
    begin_early(EARLY)
    # The last tiles come first: they have the most work, and those that begin late end soon.
    index = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head, lane = tl.program_id(1), tl.program_id(2)
    tile = index // pieces
    first = index % pieces * (ROWS // GROUP)
    count = tl.load(tiles + num_tiles + tile) - first
    first_position = tl.load(tiles + 3 * num_tiles + tile) + first
    count = tl.minimum(count, ROWS // GROUP)
    limit = first_position + count
    if (count > 0) & (lane * PART < limit):
        first_row = tl.load(tiles + tile) + first
        slot = tl.load(tiles + 2 * num_tiles + tile).to(tl.int64)
        token = tl.arange(0, ROWS) // GROUP
        member = tl.arange(0, ROWS) % GROUP
        head = kv_head * (HEADS // KV_HEADS) + member
        column = tl.arange(0, PADDED)[None, :]
        known = (token < count) & (member < HEADS // KV_HEADS)
        inside = within(known[:, None], column, DIM, PADDED)
        at = (((first_row + token).to(tl.int64) * HEADS + head) * DIM)[:, None] + column
        query = tl.load(queries + at, mask=inside, other=0.0)
        positions = first_position + token
        entries = table + slot * table_stride
        if weighted is not None:
            for part in range(lane, tl.cdiv(limit, PART), tl.num_programs(2)):
                row_max, row_sum, accumulator = _empty(ROWS, PADDED)
                for start in range(part * PART, tl.minimum(part * PART + PART, limit), KEYS):
                    row_max, row_sum, accumulator = _add_keys(
                        query, positions, row_max, row_sum, accumulator, start, limit, entries,
                        key_cache, value_cache, kv_head, scale, column, KV_HEADS, DIM, PADDED,
                        BLOCK_SIZE, KEYS,
                    )  # fmt: skip
                place = (tile * HEADS + head).to(tl.int64) * most_parts + part
                tl.store(weights + 2 * place, row_max, mask=known)
                tl.store(weights + 2 * place + 1, row_sum, mask=known)
                target = weighted + place[:, None] * PADDED + column
                tl.store(target, accumulator, mask=known[:, None])
        else:
            row_max, row_sum, accumulator = _empty(ROWS, PADDED)
            total_max, total_sum, total = _empty(ROWS, PADDED)
            for start in range(0, limit, KEYS):
                row_max, row_sum, accumulator = _add_keys(
                    query, positions, row_max, row_sum, accumulator, start, limit, entries,
                    key_cache, value_cache, kv_head, scale, column, KV_HEADS, DIM, PADDED,
                    BLOCK_SIZE, KEYS,
                )  # fmt: skip
                if (start + KEYS) % PART == 0:
                    total_max, total_sum, total = _add_part(
                        total_max, total_sum, total, row_max, row_sum, accumulator
                    )
                    row_max, row_sum, accumulator = _empty(ROWS, PADDED)
            _, total_sum, total = _add_part(
                total_max, total_sum, total, row_max, row_sum, accumulator
            )
            result = total / total_sum[:, None]
            tl.store(out + at, result.to(out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tiles", "most_parts"])
def _add_parts_kernel(
    tiles, weighted, weights, out, num_tiles, most_parts,
    HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PART: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """A head of a tile of one query a program."""
    begin_early(EARLY)
    tile, head = tl.program_id(0), tl.program_id(1)
    if tl.load(tiles + num_tiles + tile) > 0:
        row = tl.load(tiles + tile).to(tl.int64)
        limit = tl.load(tiles + 3 * num_tiles + tile) + 1
        column, only = tl.arange(0, PADDED), tl.arange(0, 1)
        first = (tile * HEADS + head).to(tl.int64) * most_parts
        total_max = tl.full([1], LOWEST, tl.float32)
        total_sum = tl.zeros([1], tl.float32)
        total = tl.zeros([PADDED], tl.float32)
        for part in range(tl.cdiv(limit, PART)):
            place = first + part
            row_max = tl.load(weights + 2 * place + only)
            row_sum = tl.load(weights + 2 * place + 1 + only)
            accumulator = tl.load(weighted + place * PADDED + column)
            total_max, total_sum, total = _add_part(
                total_max, total_sum, total, row_max, row_sum, accumulator
            )
        inside = within(column >= 0, column, DIM, PADDED)
        result = (total / total_sum).to(out.dtype.element_ty)
        tl.store(out + (row * HEADS + head) * DIM + column, result, mask=inside)


def _shape(head_bytes: int) -> tuple[int, int]:
    """Keys of a tile, and warps of 16 rows, for keys of so many bytes: the same for all of a
    model's steps, because they decide the order of sums."""
    return (64, 4) if head_bytes <= _LARGEST_HEAD else (32, 1)


def fixed_attention(
    queries: Tensor,
    tiles: Tensor,
    num_tiles: int,
    table: Tensor,
    cache: LayerCache,
    out: Tensor,
    score_scale: float,
    most: int = QUERY_TILE,
    sums: PartSums | None = None,
) -> None:
    """The arguments are those of ``prefill_attention``, for scores that are only scaled, by
    ``score_scale`` times log2(e). most: queries of a tile; sums: for tiles of one query, of which
    few are divided among programs then."""
    _, heads, dim = queries.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    if not num_tiles:
        return
    group = triton.next_power_of_2(heads // kv_heads)
    rows = max(_ROWS, group)
    pieces = triton.cdiv(most, rows // group)
    keys, warps = _shape(dim * queries.element_size())
    lanes = 1 if sums is None else _lanes(num_tiles, kv_heads, sums)
    divided = sums if lanes > 1 else None
    parts, padded = 0 if divided is None else divided.weights.shape[2], 2 * padded_half(dim)
    # With less on its way a program leaves room for others, which chunks have enough of.
    stages = 5 if most == 1 or warps == 1 else 3
    _fixed_attention_kernel[(num_tiles * pieces, kv_heads, lanes)](
        queries, tiles, table, cache.keys, cache.values, out, *(divided or (None, None)),
        score_scale, table.stride(0), tiles.shape[1], pieces, parts, heads, kv_heads, dim, padded,
        block_size, rows, group, keys, PART, EARLY,
        num_warps=warps * rows // _ROWS, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
    if divided is not None:
        _add_parts_kernel[(num_tiles, heads)](
            tiles, *divided, out, tiles.shape[1], parts, heads, dim, padded, PART, EARLY,
            num_warps=1, launch_pdl=EARLY,
        )  # fmt: skip


def _lanes(rows: int, kv_heads: int, sums: PartSums) -> int:
    """Programs that the context of a decode row is divided among."""
    if rows > len(sums.weights):
        return 1
    return min(_MOST_LANES, sums.weights.shape[2], 4 * _DIVIDED // (rows * kv_heads))
