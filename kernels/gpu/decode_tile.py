"""What a program of ``decode_attention`` does with a tile of positions, with its row's new one, and
with what is known of a shared prefix."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.cache_codes import (
    codes_of,
    codes_place,
    key_operand,
    largest,
    numbers,
    scale_of,
    scale_place,
    value_pairs,
)
from penstock.kernels.gpu.device_functions import capped, dot, softmax_step, within

_MOST_E4M3 = tl.constexpr(448.0)
_LEAST_QUERY = tl.constexpr(1e-30)
_LEAST_LIFT = tl.constexpr(1e-12)
"""Of a scale: zeros that nothing has been written over have none."""
_OF_BITS = tl.constexpr(2.0**-23)
_MANY_SPLITS, _LONG_SPLIT = tl.constexpr(32), tl.constexpr(128)
"""The latter in positions."""


@triton.jit
def with_prefix(
    row_max, row_sum, accumulator, partial, sums, pair, query, column, valid,
    SHARED: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Add the parts of the shared prefix to what the heads of a (row, KV head) pair have."""
    inside = (query < SHARED) & valid
    for part in range(PARTS):
        at = (pair.to(tl.int64) * PARTS + part) * SHARED + query
        part_max = tl.load(sums + 2 * at, mask=inside, other=float("-inf"))
        part_sum = tl.load(sums + 2 * at + 1, mask=inside, other=0.0)
        there = within(inside[:, None], column[None, :], DIM, PADDED)
        part_accumulator = tl.load(
            partial + at[:, None] * DIM + column[None, :], mask=there, other=0.0
        )
        new_max = tl.maximum(row_max, part_max)
        decay = tl.exp2(row_max - new_max)
        share = tl.exp2(part_max - new_max)
        row_sum = row_sum * decay + part_sum * share
        accumulator = accumulator * decay[:, None] + part_accumulator * share[:, None]
        row_max = new_max
    return row_max, row_sum, accumulator


@triton.jit
def attended(
    first, second, position, inside, row_max, row_sum, accumulator, entries, key_cache, value_cache,
    kv_head, scale,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What the heads of a row have, with these positions where ``inside``."""
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    column = tl.arange(0, 2 * PADDED_HALF)
    block = tl.load(entries + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, position % BLOCK_SIZE
    place = (page * BLOCK_SIZE + offset) * dim
    keys = key_cache + place[:, None] + half[None, :]
    of_keys = within(inside[:, None], half[None, :], HALF, PADDED_HALF)
    of_values = within(inside[:, None], column[None, :], dim, 2 * PADDED_HALF)
    key_first = tl.load(keys, mask=of_keys, other=0.0)
    key_second = tl.load(keys + HALF, mask=of_keys, other=0.0)
    value = tl.load(value_cache + place[:, None] + column[None, :], mask=of_values, other=0.0)
    score = dot(first, tl.trans(key_first)) + dot(second, tl.trans(key_second))
    score = tl.where(inside[None, :], capped(score, scale, CAP), float("-inf"))
    return softmax_step(score, value, row_max, row_sum, accumulator, 1.0)


@triton.jit
def listed_positions(
    listed, start, ahead, skipped, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):  # fmt: skip
    """A tile of the positions of listed blocks, and which of them a row sees."""
    index = start + tl.arange(0, TILE)
    number = tl.load(listed + index // BLOCK_SIZE, mask=index < ahead, other=0)
    position = number * BLOCK_SIZE + index % BLOCK_SIZE
    return position, (index < ahead) & (position < skipped)


@triton.jit
def repeated(x, ROWS: tl.constexpr, TIMES: tl.constexpr):
    """x, [ROWS], with each number ``TIMES`` times, one behind the other."""
    if TIMES == 1:
        return x
    else:
        return tl.reshape(tl.broadcast_to(x[:, None], [ROWS, TIMES]), [ROWS * TIMES])


@triton.jit
def _repeated_rows(x, ROWS: tl.constexpr, TIMES: tl.constexpr, WIDTH: tl.constexpr):
    """Likewise the rows of x, [ROWS, WIDTH]."""
    if TIMES == 1:
        return x
    else:
        wide = tl.broadcast_to(x[:, None, :], [ROWS, TIMES, WIDTH])
        return tl.reshape(wide, [ROWS * TIMES, WIDTH])


@triton.jit
def query_operands(first, second, ROWS: tl.constexpr, TIMES: tl.constexpr, WIDTH: tl.constexpr):
    """Halves of queries [ROWS, WIDTH] of 16 bits, ``repeated``, as float16 [WIDTH, Q], and what
    they are to be multiplied by [Q]: a power of two, so that they stay exact. fp32 ones are as they
    are."""
    if first.dtype == tl.float32:
        unit = tl.sum(first, 1) * 0.0 + 1.0
    else:
        first, second = first.to(tl.float32), second.to(tl.float32)
        most = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
        exponent = tl.maximum(most, _LEAST_QUERY).to(tl.int32, bitcast=True) & 0x7F800000
        unit = exponent.to(tl.float32, bitcast=True)
        first, second = first / unit[:, None], second / unit[:, None]
        first, second = first.to(tl.float16), second.to(tl.float16)
    first = tl.trans(_repeated_rows(first, ROWS, TIMES, WIDTH))
    second = tl.trans(_repeated_rows(second, ROWS, TIMES, WIDTH))
    return first, second, repeated(unit, ROWS, TIMES)


@triton.jit
def lifted(score, value_scale):
    """Scores (binary logarithm) with the scales of values taken into the exponent: weights that
    are made by the highest of these have room in float16 once they are multiplied by the scales.
    The logarithm is the bits' own, at most 0.09 too small."""
    bits = tl.maximum(value_scale, _LEAST_LIFT).to(tl.int32, bitcast=True)
    return score + (bits.to(tl.float32) * _OF_BITS - 127.0)


@triton.jit
def with_lifted(score, accumulator, value):
    """What heads [Q] have of one position alone, by its lifted score. accumulator: [Q, D], its
    value for each head; value: [D] fp32."""
    row_max = lifted(score, tl.max(tl.abs(value), 0) / _MOST_E4M3)
    row_sum = tl.exp2(score - row_max)
    return row_max, row_sum, accumulator * row_sum[:, None]


@triton.jit
def attended_codes(
    first, second, unit, position, inside, row_max, row_sum, even, odd, entries, key_cache,
    value_cache, key_scales, value_scales, kv_head, scale,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """As ``attended``, of quantized caches. first, second, unit: from ``query_operands``; row_max:
    of ``lifted`` scores; even, odd: those numbers of the accumulator's rows, [D / 2, Q].

    Keys and values are the left operands of products, queries and weights the right ones: these are
    filled up to 8 columns, where left ones would be to 16 rows.
    """
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    block = tl.load(entries + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, position % BLOCK_SIZE
    place = codes_place(page, offset, dim, BLOCK_SIZE)
    keys = key_cache + place[:, None] + half[None, :]
    pairs_at = value_cache.to(tl.pointer_type(tl.int16), bitcast=True) + (place // 2)[None, :]
    of_keys = within(inside[:, None], half[None, :], HALF, PADDED_HALF)
    of_values = within(inside[None, :], half[:, None], HALF, PADDED_HALF)
    key_first = tl.load(keys, mask=of_keys, other=0.0)
    key_second = tl.load(keys + HALF, mask=of_keys, other=0.0)
    pairs = tl.load(pairs_at + half[:, None], mask=of_values, other=0)
    at = scale_place(page, offset, dim, BLOCK_SIZE)
    key_scale = tl.load(key_scales + at, mask=inside, other=0.0)
    value_scale = tl.load(value_scales + at, mask=inside, other=0.0)
    score = dot(key_operand(key_first, first), first)
    score += dot(key_operand(key_second, first), second)
    score = capped(score * key_scale[:, None], scale * unit[None, :], CAP)
    score = tl.where(inside[:, None], score, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(lifted(score, value_scale[:, None]), 0))
    weight = tl.exp2(score - new_max[None, :])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weight, 0)
    value_even, value_odd = value_pairs(pairs, value_cache, first)
    weight = (weight * value_scale[:, None]).to(first.dtype)
    even = even * decay[None, :] + dot(value_even, weight)
    odd = odd * decay[None, :] + dot(value_odd, weight)
    return new_max, row_sum, even, odd


@triton.jit
def tiles_each(tiles, splits, TILE: tl.constexpr, CODES: tl.constexpr):
    """Tiles of each split but the last. Of quantized caches those of many splits are long: more of
    them cost more to combine than they gain."""
    each = tl.maximum(tl.cdiv(tiles, splits), 1)
    if CODES:
        each = tl.maximum(each, tl.minimum(tl.cdiv(tiles, _MANY_SPLITS), _LONG_SPLIT // TILE))
    return each


@triton.jit
def _merged_parts(
    partial, partial_sums, first, count, apart, head,
    SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    MOST: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """``count`` parts, ``apart`` from each other, ``COMBINED`` of all heads at once: by one head
    after the other, the memory's latency is waited for so many times more often. Returns the
    highest scores and the sums of weights [HEADS], and the sums of values [HEADS, PADDED]."""
    column = tl.arange(0, PADDED)
    split = tl.arange(0, MOST)[:, None]
    at = (first + split * apart) * SHARED + head[None, :]
    known = (split < count) & (head < SHARED)[None, :]
    maxima = tl.load(partial_sums + 2 * at, mask=known, other=float("-inf"), cache_modifier=".cg")
    sums = tl.load(partial_sums + 2 * at + 1, mask=known, other=0.0, cache_modifier=".cg")
    highest = tl.where(head < SHARED, tl.max(maxima, 0), 0.0)
    total = tl.sum(sums * tl.exp2(maxima - highest[None, :]), 0)
    whole = tl.zeros([HEADS, PADDED], tl.float32)
    for first_part in range(0, count, COMBINED):
        part = first_part + tl.arange(0, COMBINED)[:, None]
        some = (first + part * apart) * SHARED + head[None, :]
        there = (part < count) & (head < SHARED)[None, :]
        some_maxima = tl.load(
            partial_sums + 2 * some, mask=there, other=float("-inf"), cache_modifier=".cg"
        )
        parts = tl.load(
            partial + some[:, :, None] * DIM + column[None, None, :],
            mask=within(there[:, :, None], column[None, None, :], DIM, PADDED), other=0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        whole += tl.sum(parts * tl.exp2(some_maxima - highest[None, :])[:, :, None], 0)
    return highest, total, whole


@triton.jit
def store_combined(
    out, partial, partial_sums, first, count, apart,
    SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    MOST: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """Write [SHARED, DIM] of ``count`` parts, up to ``MOST``; others as of ``_merged_parts``."""
    head = tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    _, total, whole = _merged_parts(
        partial, partial_sums, first, count, apart, head, SHARED, HEADS, DIM, PADDED, MOST, COMBINED
    )
    result = whole / tl.where(head < SHARED, total, 1.0)[:, None]
    place = out + head[:, None] * DIM + column[None, :]
    wanted = within((head < SHARED)[:, None], column[None, :], DIM, PADDED)
    tl.store(place, result.to(out.dtype.element_ty), mask=wanted)


@triton.jit
def store_group(
    partial, partial_sums, first, count,
    SHARED: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr,
    GROUP: tl.constexpr, COMBINED: tl.constexpr,
):  # fmt: skip
    """Leave ``count`` parts that follow each other, up to ``GROUP``, as one in place of the
    first."""
    head = tl.arange(0, HEADS)
    column = tl.arange(0, PADDED)
    highest, total, whole = _merged_parts(
        partial, partial_sums, first, count, 1, head, SHARED, HEADS, DIM, PADDED, GROUP, COMBINED
    )
    tl.debug_barrier()  # all are read
    at = first * SHARED + head
    wanted = within((head < SHARED)[:, None], column[None, :], DIM, PADDED)
    tl.store(partial + at[:, None] * DIM + column[None, :], whole, mask=wanted)
    tl.store(partial_sums + 2 * at, highest, mask=head < SHARED)
    tl.store(partial_sums + 2 * at + 1, total, mask=head < SHARED)


@triton.jit
def write_codes(
    first, second, value, key_cache, value_cache, key_scales, value_scales, page, offset,
    HALF: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Write the halves of a key, and a value, into a quantized cache; returns, in fp32, what is
    read of them from then on."""
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    column = tl.arange(0, 2 * PADDED_HALF)
    first, second, value = first.to(tl.float32), second.to(tl.float32), value.to(tl.float32)
    key_scale = scale_of(tl.maximum(largest(first, 0), largest(second, 0)), key_cache)
    value_scale = scale_of(largest(value, 0), value_cache)
    first_codes = codes_of(first, key_scale, key_cache)
    second_codes = codes_of(second, key_scale, key_cache)
    value_codes = codes_of(value, value_scale, value_cache)
    place = codes_place(page, offset, dim, BLOCK_SIZE)
    tl.store(key_cache + place + half, first_codes, mask=half < HALF)
    tl.store(key_cache + place + HALF + half, second_codes, mask=half < HALF)
    tl.store(value_cache + place + column, value_codes, mask=column < dim)
    at = scale_place(page, offset, dim, BLOCK_SIZE)
    tl.store(key_scales + at, key_scale)
    tl.store(value_scales + at, value_scale)
    return (
        numbers(first_codes, key_scale),
        numbers(second_codes, key_scale),
        numbers(value_codes, value_scale),
    )
