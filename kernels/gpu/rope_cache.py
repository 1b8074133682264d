"""Norm and rotation of queries and keys, and the write of K and V into the cache, in one kernel.

For each row: every query and key head is normed (where the model has that norm) and rotated as
``penstock.kernels.rotary`` says, in fp32, and rounded once. Queries go to a buffer, keys and
values to the row's place in the cache. One program handles one row; it reads and writes each value
once.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import HeadInputs, LayerCache, padded_half
from penstock.kernels.gpu.cache_codes import (
    codes_of,
    codes_place,
    largest,
    scale_of,
    scale_place,
)
from penstock.kernels.gpu.device_functions import rotated_heads, within
from penstock.kernels.gpu.early_launch import EARLY, begin_early


@triton.jit
def _rope_cache_kernel(
    qkv, slots, positions, table, cos, sin, query_weight, key_weight, query_out, key_cache,
    value_cache, key_scales, value_scales, eps, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, PADDED: tl.constexpr, KV_PADDED: tl.constexpr, NORM: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row)
    dim: tl.constexpr = 2 * HALF
    source = qkv + row * (HEADS + 2 * KV_HEADS) * dim
    half = tl.arange(0, PADDED_HALF)[None, :]
    head = tl.arange(0, PADDED)[:, None]
    first, second = rotated_heads(
        source, HEADS, cos, sin, query_weight, position, eps, PADDED, HALF, PADDED_HALF, NORM
    )
    target = query_out + (row * HEADS + head) * dim + half
    inside = within(head < HEADS, half, HALF, PADDED_HALF)
    tl.store(target, first.to(query_out.dtype.element_ty), mask=inside)
    tl.store(target + HALF, second.to(query_out.dtype.element_ty), mask=inside)

    block = tl.load(table + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    kv_head = tl.arange(0, KV_PADDED)[:, None]
    inside = within(kv_head < KV_HEADS, half, HALF, PADDED_HALF)
    page, offset = block.to(tl.int64) * KV_HEADS + kv_head, position % BLOCK_SIZE
    first, second = rotated_heads(
        source + HEADS * dim, KV_HEADS, cos, sin, key_weight, position, eps,
        KV_PADDED, HALF, PADDED_HALF, NORM,
    )  # fmt: skip
    column = tl.arange(0, 2 * PADDED_HALF)[None, :]
    values = source + (HEADS + KV_HEADS + kv_head) * dim + column
    of_values = within(kv_head < KV_HEADS, column, dim, 2 * PADDED_HALF)
    if key_scales is not None:
        # Rounded to the model's type first, as the reference has them.
        first = first.to(query_out.dtype.element_ty).to(tl.float32)
        second = second.to(query_out.dtype.element_ty).to(tl.float32)
        value = tl.load(values, mask=of_values, other=0.0).to(tl.float32)
        scale = scale_of(tl.maximum(largest(first, 1), largest(second, 1)), key_cache)[:, None]
        value_scale = scale_of(largest(value, 1), value_cache)[:, None]
        place = codes_place(page, offset, dim, BLOCK_SIZE)
        tl.store(key_cache + place + half, codes_of(first, scale, key_cache), mask=inside)
        tl.store(key_cache + place + HALF + half, codes_of(second, scale, key_cache), mask=inside)
        codes = codes_of(value, value_scale, value_cache)
        tl.store(value_cache + place + column, codes, mask=of_values)
        at = scale_place(page, offset, dim, BLOCK_SIZE)
        tl.store(key_scales + at, scale, mask=kv_head < KV_HEADS)
        tl.store(value_scales + at, value_scale, mask=kv_head < KV_HEADS)
    else:
        place = (page * BLOCK_SIZE + offset) * dim
        keys = key_cache + place + half
        tl.store(keys, first.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(keys + HALF, second.to(key_cache.dtype.element_ty), mask=inside)
        tl.store(value_cache + place + column, tl.load(values, mask=of_values), mask=of_values)


class RopeConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    half: int
    padded_half: int
    block_size: int
    padded: int
    """Heads, filled up to a power of two."""
    kv_padded: int
    norm: bool
    early: bool


def rope_and_cache(
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    heads: HeadInputs,
    query_out: Tensor,
    cache: LayerCache,
    eps: float,
) -> None:
    """qkv: [N, Hq + 2 Hkv, D]; slots, positions: [N] int32, a row with slot -1 is left alone;
    table: [S, W] int32; query_out: [N, Hq, D]; eps: of the norms of heads. All contiguous, D
    even.
    """
    rows, all_heads, dim = qkv.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    num_heads = all_heads - 2 * kv_heads
    constants = RopeConstants(
        heads=num_heads,
        kv_heads=kv_heads,
        half=dim // 2,
        padded_half=padded_half(dim),
        block_size=block_size,
        padded=triton.next_power_of_2(num_heads),
        kv_padded=triton.next_power_of_2(kv_heads),
        norm=heads.query_weight is not None,
        early=EARLY,
    )
    if rows:
        _rope_cache_kernel[(rows,)](
            qkv, slots, positions, table, *heads, query_out, *cache, eps, table.stride(0),
            *constants, num_warps=8 if num_heads * dim > 4096 else 4, launch_pdl=EARLY,
        )  # fmt: skip
