"""Keys and values of a byte a number, once more in the model's type, for a kernel that reads those.

What a step's chunks attend to, cached positions and their own, is read through the block tables
once in a layer and written into memory of its own, a sequence behind the other, with a block table
of its own: so it is bound by the memory's bandwidth, where attention of chunks is bound by
arithmetic. What is written are the numbers that the codes stand for, rounded to the model's type;
they depend on nothing but the codes. Reference: ``penstock.kernels.quantized_cache``.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import LayerCache
from penstock.kernels.gpu.cache_codes import codes_place, numbers, scale_place
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.device_functions import within
from penstock.kernels.gpu.early_launch import EARLY, begin_early

_LEAST_UNIT = 64
_PROGRAMS_EACH = 4
_PAST_ALL = tl.constexpr(2**31 - 1)


def unit_for(block_size: int) -> int:
    """Positions that are widened at once; a sequence begins at a multiple of it."""
    return max(_LEAST_UNIT, block_size)


class Contexts(NamedTuple):
    """What is widened, of at most C sequences."""

    firsts: Tensor
    """[C + 1] int32: the first unit of each, ascending; behind them the number of all units, also
    in the last place."""
    slots: Tensor
    """[C] int32."""


class WideCache(NamedTuple):
    keys: Tensor
    """[entries, Hkv, block_size, D] of the model's type."""
    values: Tensor
    table: Tensor
    """[slots, W] int32: the block tables of what was widened."""


# One compiled kernel serves every number of sequences of as many bits.
@triton.jit(do_not_specialize=["most"])
def _widen_kernel(
    firsts, slots, table, wide_keys, wide_values, wide_table, key_cache, value_cache, key_scales,
    value_scales, width, most,
    KV_HEADS: tl.constexpr, DIM: tl.constexpr, PADDED: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    UNIT: tl.constexpr, MOST: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    total = tl.load(firsts + most)
    every = tl.arange(0, MOST)
    known = tl.load(firsts + every, mask=every < most, other=_PAST_ALL)
    column = tl.arange(0, PADDED)
    for item in range(tl.program_id(0), total * KV_HEADS, tl.num_programs(0)):
        unit, kv_head = item // KV_HEADS, item % KV_HEADS
        sequence = tl.sum((known <= unit).to(tl.int32), 0) - 1
        first = tl.load(firsts + sequence)
        slot = tl.load(slots + sequence).to(tl.int64)
        position = (unit - first) * UNIT + tl.arange(0, UNIT)
        index, offset = position // BLOCK_SIZE, position % BLOCK_SIZE
        # Past the sequence's last block a table may name any, and past its end is no table.
        inside = index < width
        block = tl.load(table + slot * width + index, mask=inside, other=0).to(tl.int64)
        page = block * KV_HEADS + kv_head
        from_codes = codes_place(page, offset, DIM, BLOCK_SIZE)[:, None] + column[None, :]
        from_scales = scale_place(page, offset, DIM, BLOCK_SIZE)
        there = within(inside[:, None], column[None, :], DIM, PADDED)
        key = tl.load(key_cache + from_codes, mask=there, other=0.0)
        value = tl.load(value_cache + from_codes, mask=there, other=0.0)
        key_scale = tl.load(key_scales + from_scales, mask=inside, other=0.0)
        value_scale = tl.load(value_scales + from_scales, mask=inside, other=0.0)
        wide_block = first * (UNIT // BLOCK_SIZE) + index
        place = ((wide_block.to(tl.int64) * KV_HEADS + kv_head) * BLOCK_SIZE + offset) * DIM
        place = place[:, None] + column[None, :]
        dtype = wide_keys.dtype.element_ty
        tl.store(wide_keys + place, numbers(key, key_scale[:, None]).to(dtype), mask=there)
        tl.store(wide_values + place, numbers(value, value_scale[:, None]).to(dtype), mask=there)
        begins = inside & (offset == 0) & (kv_head == 0)
        tl.store(wide_table + slot * width + index, wide_block, mask=begins)


class WidenConstants(NamedTuple):
    """The kernel's constants, in its order."""

    kv_heads: int
    dim: int
    padded: int
    block_size: int
    unit: int
    most: int
    """Sequences, filled up to a power of two."""
    early: bool


def widen_cache(contexts: Contexts, table: Tensor, cache: LayerCache, wide: WideCache) -> None:
    """Widen all positions of the units of ``contexts``, for which ``wide`` has room.

    table: [slots, W] int32, the caches' own, contiguous as all others. Of a sequence's last unit,
    what lies behind its positions may be anything.
    """
    _, kv_heads, block_size, dim = wide.keys.shape
    most = len(contexts.slots)
    constants = WidenConstants(
        kv_heads, dim, triton.next_power_of_2(dim), block_size, unit_for(block_size),
        triton.next_power_of_2(most), EARLY,
    )  # fmt: skip
    _widen_kernel[(_PROGRAMS_EACH * multiprocessors(),)](
        *contexts, table, *wide, *cache, table.shape[1], most, *constants, num_warps=4,
        launch_pdl=EARLY,
    )  # fmt: skip


def wide_cache(
    units: int, kv_heads: int, block_size: int, dim: int, table: Tensor, dtype: torch.dtype
) -> WideCache:
    """Memory for so many units; table: a block table as large as the new one."""
    blocks = units * unit_for(block_size) // block_size
    shape = (blocks, kv_heads, block_size, dim)
    keys, values = (torch.zeros(shape, dtype=dtype, device=table.device) for _ in range(2))
    return WideCache(keys, values, torch.zeros_like(table))
