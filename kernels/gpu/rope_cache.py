"""Norm and rotation of queries and keys, and the write of K and V into the cache, in one kernel.

For each row: every query and key head is normed (where the model has that norm) and rotated as
``penstock.kernels.rotary`` says, in fp32, and rounded once. Queries go to a buffer, keys and
values to the row's place in the cache. One program handles one row; it reads and writes each value
once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import rotated_heads
from penstock.kernels.gpu.early_launch import EARLY, begin_early


@triton.jit
def _rope_cache_kernel(
    qkv, slots, positions, table, cos, sin, query_weight, key_weight, query_out, key_cache,
    value_cache, eps, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    PADDED: tl.constexpr, KV_PADDED: tl.constexpr, NORM: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    if slot < 0:
        return
    position = tl.load(positions + row)
    dim: tl.constexpr = 2 * HALF
    source = qkv + row * (HEADS + 2 * KV_HEADS) * dim
    half = tl.arange(0, HALF)[None, :]
    head = tl.arange(0, PADDED)[:, None]
    first, second = rotated_heads(
        source, HEADS, cos, sin, query_weight, position, eps, PADDED, HALF, NORM
    )
    target = query_out + (row * HEADS + head) * dim + half
    tl.store(target, first.to(query_out.dtype.element_ty), mask=head < HEADS)
    tl.store(target + HALF, second.to(query_out.dtype.element_ty), mask=head < HEADS)

    block = tl.load(table + slot.to(tl.int64) * table_stride + position // BLOCK_SIZE)
    kv_head = tl.arange(0, KV_PADDED)[:, None]
    inside = kv_head < KV_HEADS
    place = (block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + position % BLOCK_SIZE
    first, second = rotated_heads(
        source + HEADS * dim, KV_HEADS, cos, sin, key_weight, position, eps, KV_PADDED, HALF, NORM
    )
    keys = key_cache + place * dim + half
    tl.store(keys, first.to(key_cache.dtype.element_ty), mask=inside)
    tl.store(keys + HALF, second.to(key_cache.dtype.element_ty), mask=inside)
    column = tl.arange(0, dim)[None, :]
    values = source + (HEADS + KV_HEADS + kv_head) * dim + column
    tl.store(value_cache + place * dim + column, tl.load(values, mask=inside), mask=inside)


def rope_and_cache(
    qkv: Tensor,
    slots: Tensor,
    positions: Tensor,
    table: Tensor,
    cos: Tensor,
    sin: Tensor,
    query_weight: Tensor | None,
    key_weight: Tensor | None,
    query_out: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    eps: float,
) -> None:
    """qkv: [N, Hq + 2 Hkv, D]; slots, positions: [N] int32, a row with slot -1 is left alone;
    table: [S, W] int32; cos, sin: [P, D / 2] fp32; weights: [D] or both ``None``; query_out:
    [N, Hq, D]; caches: [num_blocks, Hkv, block_size, D]. All contiguous, D a power of two.
    """
    rows, all_heads, dim = qkv.shape
    _, kv_heads, block_size, _ = key_cache.shape
    heads = all_heads - 2 * kv_heads
    if rows:
        _rope_cache_kernel[(rows,)](
            qkv, slots, positions, table, cos, sin, query_weight, key_weight, query_out, key_cache,
            value_cache, eps, table.stride(0), heads, kv_heads, dim // 2, block_size,
            triton.next_power_of_2(heads), triton.next_power_of_2(kv_heads),
            query_weight is not None, EARLY, num_warps=8 if heads * dim > 4096 else 4,
            launch_pdl=EARLY,
        )  # fmt: skip
