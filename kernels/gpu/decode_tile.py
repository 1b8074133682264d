"""What a program of ``decode_attention`` does with a tile of positions, with its row's new one, and
with what is known of a shared prefix."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.cache_codes import (
    codes_of,
    codes_place,
    largest,
    numbers,
    operand,
    scale_of,
    scale_place,
    value_pairs,
    values_for,
)
from penstock.kernels.gpu.device_functions import capped, dot, softmax_step, within


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
    key_scales, value_scales, kv_head, scale,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """What the heads of a row have, with these positions where ``inside``."""
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    column = tl.arange(0, 2 * PADDED_HALF)
    block = tl.load(entries + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, position % BLOCK_SIZE
    if key_scales is not None:
        place = codes_place(page, offset, dim, BLOCK_SIZE)
    else:
        place = (page * BLOCK_SIZE + offset) * dim
    keys = key_cache + place[:, None] + half[None, :]
    of_keys = within(inside[:, None], half[None, :], HALF, PADDED_HALF)
    of_values = within(inside[:, None], column[None, :], dim, 2 * PADDED_HALF)
    key_first = tl.load(keys, mask=of_keys, other=0.0)
    key_second = tl.load(keys + HALF, mask=of_keys, other=0.0)
    value = tl.load(value_cache + place[:, None] + column[None, :], mask=of_values, other=0.0)
    if key_scales is not None:
        at = scale_place(page, offset, dim, BLOCK_SIZE)
        key_first, key_second = operand(key_first, first), operand(key_second, first)
        score = dot(first, tl.trans(key_first)) + dot(second, tl.trans(key_second))
        score = score * tl.load(key_scales + at, mask=inside, other=0.0)[None, :]
        of_codes = tl.load(value_scales + at, mask=inside, other=0.0)
        value, value_scale = values_for(value, of_codes, first)
    else:
        score = dot(first, tl.trans(key_first)) + dot(second, tl.trans(key_second))
        value_scale = None
    score = tl.where(inside[None, :], capped(score, scale, CAP), float("-inf"))
    return softmax_step(score, value, row_max, row_sum, accumulator, 1.0, value_scale)


@triton.jit
def attended_codes(
    first, second, position, inside, row_max, row_sum, even, odd, entries, key_cache, value_cache,
    key_scales, value_scales, kv_head, scale,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """As ``attended``, of quantized caches; even, odd: those numbers of the accumulator's rows."""
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    block = tl.load(entries + position // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, position % BLOCK_SIZE
    place = codes_place(page, offset, dim, BLOCK_SIZE)
    keys = key_cache + place[:, None] + half[None, :]
    pairs_at = value_cache.to(tl.pointer_type(tl.int16), bitcast=True) + (place // 2)[:, None]
    there = within(inside[:, None], half[None, :], HALF, PADDED_HALF)
    key_first = tl.load(keys, mask=there, other=0.0)
    key_second = tl.load(keys + HALF, mask=there, other=0.0)
    pairs = tl.load(pairs_at + half[None, :], mask=there, other=0)
    at = scale_place(page, offset, dim, BLOCK_SIZE)
    key_scale = tl.load(key_scales + at, mask=inside, other=0.0)
    value_scale = tl.load(value_scales + at, mask=inside, other=0.0)
    score = dot(first, tl.trans(operand(key_first, first)))
    score += dot(second, tl.trans(operand(key_second, first)))
    score = capped(score * key_scale[None, :], scale, CAP)
    score = tl.where(inside[None, :], score, float("-inf"))
    value_even, value_odd, value_scale = value_pairs(pairs, value_scale, value_cache, first)
    new_max = tl.maximum(row_max, tl.max(score, 1))
    weight = tl.exp2(score - new_max[:, None])
    decay = tl.exp2(row_max - new_max)
    row_sum = row_sum * decay + tl.sum(weight, 1)
    weight = (weight * value_scale[None, :]).to(value_even.dtype)
    even = even * decay[:, None] + dot(weight, value_even)
    odd = odd * decay[:, None] + dot(weight, value_odd)
    return new_max, row_sum, even, odd


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
