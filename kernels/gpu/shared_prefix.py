"""Attention of decode rows over a prefix that they share, each block read once for all of them.

Rows whose block tables begin with the same blocks would each read those again. Here the queries of
some rows to one KV head stand together as one operand, as in a prefill, and attend to the common
positions: the cascade of Hydragen (Juravsky et al. 2024). The result is a part like the splits of
``decode_attention``, which goes on from it with each row's suffix. Reference:
``penstock.kernels.attention``.

Hopper GPUs have a kernel of their own for it (``shared_prefix_hopper``).

The positions are cut into a few splits so that few rows fill the GPU too. The grid depends on
the number of rows alone; which rows take part, and up to where, lies on the device. It changes
between steps only, and a step's first kernels let nothing start before they have waited
(``slots.embed``), and so a program reads it before it waits for the kernel ahead. The kernel behind
starts when all programs have waited for the kernel ahead: it may read QKV at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import (
    LOG2_E,
    DecodeBatch,
    HeadInputs,
    LayerCache,
    padded_half,
)
from penstock.kernels.gpu.cache_codes import codes_place, operand, scale_place, values_for
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.device_functions import dot, rotated_queries, softmax_step, within
from penstock.kernels.gpu.early_launch import EARLY

_MOST_PARTS = 16


class Shape(NamedTuple):
    queries: int
    """Queries of one program; 64 of them, or more, are an operand of Hopper's matrix unit."""
    tile: int
    """Positions that are multiplied at once; half as many of wide heads."""
    warps: int
    stages: int
    """Loads under way; from three on the look-up of blocks is ahead of them, too."""
    programs: int
    """Up to so many for each multiprocessor: a prefix is cut until there are (``parts_for``, for
    the kernel of Hopper GPUs, too, which has half as many of twice the queries)."""


SHAPE = Shape(64, 64, 4, 2, 2)
"""On an H200, 256 rows of Qwen3-8B behind 2,048 positions take 33 µs a layer; of ten others one was
faster, 29 µs, by 128 queries with eight warps and five stages, more than other GPUs have memory
for."""
MOST_SHARED = SHAPE.queries
"""Query heads of a KV head: those of a row stand in one program."""


class PrefixConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    shared: int
    """Query heads for a KV head."""
    padded: int
    """Those, filled up to a power of two."""
    queries: int
    half: int
    padded_half: int
    block_size: int
    tile: int
    norm: bool
    early: bool


class SharedPrefix(NamedTuple):
    """Which slots share a prefix, and memory for what their rows get from it."""

    slot: Tensor
    """[1] int32: one of the slots; its block table is read. -1: nothing is shared."""
    lengths: Tensor
    """[slots] int32: positions of each slot that are shared, a multiple of the block size; the same
    for all that take part, else 0."""
    partial: Tensor
    """[rows, Hkv, parts, Hq / Hkv, D] fp32, ``parts_for`` the rows: weighted sums of values."""
    sums: Tensor
    """[rows, Hkv, parts, Hq / Hkv, 2] fp32: highest score (binary logarithm), total of weights."""


@triton.jit
def _attended(
    entries, key_cache, value_cache, key_scales, value_scales, kv_head, start, end, first, second,
    row_max, row_sum, accumulator, scale,
    KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax: positions ``start`` up to ``end``, no more than a tile."""
    dim: tl.constexpr = 2 * HALF
    half = tl.arange(0, PADDED_HALF)
    column = tl.arange(0, 2 * PADDED_HALF)
    at = start + tl.arange(0, TILE)
    inside = at < end
    if FULL:
        block = tl.load(entries + at // BLOCK_SIZE).to(tl.int64)
    else:
        block = tl.load(entries + at // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
    page, offset = block * KV_HEADS + kv_head, at % BLOCK_SIZE
    if key_scales is not None:
        place = codes_place(page, offset, dim, BLOCK_SIZE)
    else:
        place = (page * BLOCK_SIZE + offset) * dim
    keys = key_cache + place[:, None] + half[None, :]
    values = value_cache + place[:, None] + column[None, :]
    if FULL and HALF == PADDED_HALF:
        key_first = tl.load(keys)
        key_second = tl.load(keys + HALF)
        value = tl.load(values)
    else:
        of_keys = within(inside[:, None], half[None, :], HALF, PADDED_HALF)
        of_values = within(inside[:, None], column[None, :], dim, 2 * PADDED_HALF)
        key_first = tl.load(keys, mask=of_keys, other=0.0)
        key_second = tl.load(keys + HALF, mask=of_keys, other=0.0)
        value = tl.load(values, mask=of_values, other=0.0)
    if key_scales is not None:
        of_scales = scale_place(page, offset, dim, BLOCK_SIZE)
        key_first, key_second = operand(key_first, first), operand(key_second, first)
        score = dot(first, tl.trans(key_first)) + dot(second, tl.trans(key_second))
        score = score * tl.load(key_scales + of_scales, mask=inside, other=0.0)[None, :]
        of_codes = tl.load(value_scales + of_scales, mask=inside, other=0.0)
        value, value_scale = values_for(value, of_codes, first)
    else:
        score = dot(first, tl.trans(key_first)) + dot(second, tl.trans(key_second))
        value_scale = None
    if not FULL:
        score = tl.where(inside[None, :], score, float("-inf"))
    return softmax_step(score, value, row_max, row_sum, accumulator, scale, value_scale)


# One compiled kernel serves every number of rows and parts.
@triton.jit(do_not_specialize=["count", "table_stride"])
def _prefix_kernel(
    qkv, rows, last_position, shared_slot, shared_lengths, table, cos, sin, query_weight,
    key_cache, value_cache, key_scales, value_scales, partial, partial_sums, count, scale, eps,
    table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, PADDED: tl.constexpr,
    QUERIES: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    leader = tl.load(shared_slot)
    length = tl.load(shared_lengths + leader, mask=leader >= 0, other=0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    parts = tl.num_programs(2)
    dim: tl.constexpr = 2 * HALF
    query = tl.arange(0, QUERIES)
    row = tl.program_id(0) * (QUERIES // PADDED) + query // PADDED
    head = query % PADDED
    slot = tl.load(rows + row, mask=row < count, other=-1)
    known = slot >= 0
    takes_part = tl.load(shared_lengths + slot, mask=known, other=0) > 0
    takes_part = takes_part & (head < SHARED)
    position = tl.load(last_position + slot, mask=known, other=0)
    active = tl.max(takes_part.to(tl.int32), 0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # not before: it reads QKV without a wait
    # Not earlier either: the end of the kernel ahead must be behind that of this one.
    if (length == 0) | (active == 0):
        return
    first_head = row.to(tl.int64) * (HEADS + 2 * KV_HEADS) + kv_head * SHARED + head
    first, second = rotated_queries(
        qkv + first_head[:, None] * dim, cos, sin, query_weight, position,
        takes_part[:, None], eps, HALF, PADDED_HALF, NORM,
    )  # fmt: skip
    dtype = qkv.dtype.element_ty
    first = first.to(dtype)
    second = second.to(dtype)
    column = tl.arange(0, 2 * PADDED_HALF)
    row_max = tl.full([QUERIES], float("-inf"), tl.float32)
    row_sum = tl.zeros([QUERIES], tl.float32)
    accumulator = tl.zeros([QUERIES, 2 * PADDED_HALF], tl.float32)
    entries = table + leader.to(tl.int64) * table_stride
    each = tl.cdiv(tl.cdiv(length, TILE), parts) * TILE
    end = tl.minimum(part * each + each, length)
    begin = part * each
    full = tl.maximum(end - begin, 0) // TILE * TILE
    for start in range(begin, begin + full, TILE):
        row_max, row_sum, accumulator = _attended(
            entries, key_cache, value_cache, key_scales, value_scales, kv_head, start, end, first,
            second, row_max, row_sum, accumulator, scale,
            KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, TILE, True,
        )  # fmt: skip
    if begin + full < end:
        row_max, row_sum, accumulator = _attended(
            entries, key_cache, value_cache, key_scales, value_scales, kv_head, begin + full, end,
            first, second, row_max, row_sum, accumulator, scale,
            KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, TILE, False,
        )  # fmt: skip
    # [row, kv head, part, query head]; a part without positions has weight 0
    to = ((row.to(tl.int64) * KV_HEADS + kv_head) * parts + part) * SHARED + head
    written = within(takes_part[:, None], column[None, :], dim, 2 * PADDED_HALF)
    tl.store(partial + to[:, None] * dim + column[None, :], accumulator, mask=written)
    tl.store(partial_sums + 2 * to, row_max, mask=takes_part)
    tl.store(partial_sums + 2 * to + 1, row_sum, mask=takes_part)


def why_not(shared: int) -> str:
    """Why no kernel can attend over a shared prefix; empty if one can. shared: Hq / Hkv."""
    if shared > MOST_SHARED:
        return f"takes up to {MOST_SHARED} heads for a KV head, not {shared}"
    return ""


def parts_for(rows: int, heads: int, kv_heads: int) -> int:
    """The number of splits that the prefix is cut into: a power of two."""
    programs = _row_tiles(rows, heads // kv_heads) * kv_heads
    most = SHAPE.programs * multiprocessors()
    return int(min(_MOST_PARTS, 1 << (max(1, most // programs).bit_length() - 1)))


def _row_tiles(rows: int, shared: int) -> int:
    return triton.cdiv(rows * triton.next_power_of_2(shared), SHAPE.queries)


def shared_prefix(
    slot: Tensor, lengths: Tensor, max_rows: int, heads: int, kv_heads: int, head_dim: int
) -> SharedPrefix:
    """With memory for every number of rows up to ``max_rows``."""
    most = max(rows * parts_for(rows, heads, kv_heads) for rows in range(1, max_rows + 1))
    device = slot.device
    return SharedPrefix(
        slot, lengths,
        torch.empty(most * heads * head_dim, dtype=torch.float32, device=device),
        torch.empty(2 * most * heads, dtype=torch.float32, device=device),
    )  # fmt: skip


def prefix_attention(
    qkv: Tensor,
    batch: DecodeBatch,
    prefix: SharedPrefix,
    heads: HeadInputs,
    cache: LayerCache,
    eps: float,
    scale: float | None = None,
) -> None:
    """The part of each row that shares the prefix; arguments as ``decode_attention``'s; scale: by
    default 1 / sqrt(D).

    Raises ``ValueError`` for more heads than a program has room for (``why_not``).
    """
    count, all_heads, dim = qkv.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    num_heads = all_heads - 2 * kv_heads
    shared = num_heads // kv_heads
    if reason := why_not(shared):
        raise ValueError(f"attention over a shared prefix {reason}")
    constants = PrefixConstants(
        heads=num_heads,
        kv_heads=kv_heads,
        shared=shared,
        padded=triton.next_power_of_2(shared),
        queries=SHAPE.queries,
        half=dim // 2,
        padded_half=padded_half(dim),
        block_size=block_size,
        tile=SHAPE.tile // 2 if dim * qkv.element_size() > 256 else SHAPE.tile,
        norm=heads.query_weight is not None,
        early=EARLY,
    )
    parts = parts_for(count, num_heads, kv_heads)
    rows, last_position, table = batch
    _prefix_kernel[(_row_tiles(count, shared), kv_heads, parts)](
        qkv, rows, last_position, prefix.slot, prefix.lengths, table, heads.cos, heads.sin,
        heads.query_weight, *cache, prefix.partial, prefix.sums, count,
        (scale or dim**-0.5) * LOG2_E, eps, table.stride(0), *constants,
        num_warps=SHAPE.warps, num_stages=SHAPE.stages, launch_pdl=EARLY,
    )  # fmt: skip
