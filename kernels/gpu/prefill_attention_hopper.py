"""Causal attention of prefill chunks on Hopper's matrix unit, over the paged KV cache.

The tiles and the result are those of ``penstock.kernels.gpu.prefill_attention``. One program
computes one tile of one query head: a warp fetches tiles of keys and values, a block of the cache
at a time, through the tensor memory accelerator; two groups of four warps take half of the queries
each. A group starts the product with the next keys before that with the values at hand, and
computes the next weights while the latter runs. Source of these ideas: FlashAttention-3 (Shah et
al., 2024). 540 to 660 TFLOP/s on an H200 for chunks of 2,048 tokens and more, heads of 128.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperPrefillAttention`` fails.
Compute capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

DTYPES = (torch.bfloat16, torch.float16)
_LOG2_E = 1.4426950408889634
# Keys in a tile, tiles under way: the fastest of five for chunks of 4,096 and more on an H200.
_KEYS = 128
_STAGES = 2
# Of 64 Ki registers: 384 threads begin with 168 each; the groups then take from the fetching warp.
_REGISTERS = 168
_GROUP_REGISTERS = 240
_FETCH_REGISTERS = 24


@gluon.jit
def _scores(query, keys, stage, KEYS: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr):
    """Start 64 queries times a tile of keys: [64, KEYS]."""
    score = gl.zeros([64, KEYS], gl.float32, layout)
    for half in gl.static_range(HALVES):
        score = warpgroup_mma(
            query.index(half), keys.index(stage * HALVES + half).permute((1, 0)), score,
            use_acc=half > 0, is_async=True,
        )  # fmt: skip
    return score


@gluon.jit
def _weights(
    score, top, total, start, positions, scale,
    KEYS: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: maximum, sum, factor of what was summed before, weights."""
    if MASKED:
        position = start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        seen = position[None, :] <= positions[:, None]
        score = gl.where(seen, score, float("-inf"))
    highest = gl.maximum(top, gl.max(score, 1) * scale)
    weight = gl.exp2(score * scale - highest[:, None])
    decay = gl.exp2(top - highest)
    total = total * decay + gl.sum(weight, 1)
    return highest, total, decay, weight


@gluon.jit
def _clear_values(values, stage, start, limit, KEYS: gl.constexpr, HALVES: gl.constexpr):
    """Places past the sequence hold anything, NaN included; their weights are 0. Both groups write
    the same, so neither waits for the other."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    inside = start + gl.arange(0, KEYS, gl.SliceLayout(1, layout)) < limit
    for half in gl.static_range(HALVES):
        buffer = values.index(stage * HALVES + half)
        value = buffer.load(layout)
        buffer.store(gl.where(inside[:, None], value, 0.0))
    fence_async_shared()


@gluon.jit
def _turn(
    query, keys, values, key_ready, key_free, value_ready, value_free, tile, top, total, packed,
    low, high, positions, scale,
    KEYS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    score_layout: gl.constexpr, out_layout: gl.constexpr, weight_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``tile``; the values of the tile before, by its weights ``packed``."""
    stage = tile % STAGES
    before = (tile - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), (tile // STAGES) & 1)
    score = _scores(query, keys, stage, KEYS, HALVES, score_layout)
    mbarrier.wait(value_ready.index(before), ((tile - 1) // STAGES) & 1)
    low = warpgroup_mma(packed, values.index(before * HALVES), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(packed, values.index(before * HALVES + 1), high, is_async=True)
    score = warpgroup_mma_wait(HALVES, deps=(score,))
    mbarrier.arrive(key_free.index(stage))
    top, total, decay, weight = _weights(
        score, top, total, tile * KEYS, positions, scale, KEYS, MASKED, score_layout
    )
    following = gl.convert_layout(weight.to(packed.dtype), weight_layout)
    # The weights go through the wait, so that they may be computed while the products run.
    if HALVES == 2:
        low, high, packed, following = warpgroup_mma_wait(0, deps=(low, high, packed, following))
    else:
        low, packed, following = warpgroup_mma_wait(0, deps=(low, packed, following))
    mbarrier.arrive(value_free.index(before))
    decay = gl.convert_layout(decay, gl.SliceLayout(1, out_layout))
    low = low * decay[:, None]
    if HALVES == 2:
        high = high * decay[:, None]
    return top, total, following, low, high


@gluon.jit
def _attend(
    queries, out, query, keys, values, key_ready, key_free, value_ready, value_free, first_row,
    count, first_position, head, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: queries 64 * GROUP … of the tile. Heads of 128 are two
    halves of 64 in shared memory, and two accumulators."""
    HALVES: gl.constexpr = DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = queries.dtype.element_ty
    row = GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, load_layout))
    column = gl.arange(0, 64, gl.SliceLayout(0, load_layout))
    at = ((first_row + row).to(gl.int64) * HEADS + head) * DIM
    for half in gl.static_range(HALVES):
        source = queries + at[:, None] + half * 64 + column[None, :]
        query.index(half).store(gl.load(source, mask=(row < count)[:, None], other=0.0))
    fence_async_shared()

    positions = first_position + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
    limit = first_position + count
    tiles = (limit + KEYS - 1) // KEYS
    # Tiles that every query sees whole need no mask.
    whole = gl.minimum((first_position + GROUP * 64 + 1) // KEYS, tiles)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
    low = gl.zeros([64, 64], gl.float32, out_layout)
    high = gl.zeros([64, 64], gl.float32, out_layout)

    mbarrier.wait(key_ready.index(0), 0)
    score = _scores(query, keys, 0, KEYS, HALVES, score_layout)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(key_free.index(0))
    top, total, _, weight = _weights(
        score, top, total, 0, positions, scale, KEYS, True, score_layout
    )
    packed = gl.convert_layout(weight.to(dtype), weight_layout)
    for tile in range(1, whole):
        top, total, packed, low, high = _turn(
            query, keys, values, key_ready, key_free, value_ready, value_free, tile, top, total,
            packed, low, high, positions, scale, KEYS, HALVES, STAGES, False, score_layout,
            out_layout, weight_layout,
        )  # fmt: skip
    for tile in range(gl.maximum(whole, 1), tiles):
        top, total, packed, low, high = _turn(
            query, keys, values, key_ready, key_free, value_ready, value_free, tile, top, total,
            packed, low, high, positions, scale, KEYS, HALVES, STAGES, True, score_layout,
            out_layout, weight_layout,
        )  # fmt: skip

    last = tiles - 1
    stage = last % STAGES
    mbarrier.wait(value_ready.index(stage), (last // STAGES) & 1)
    if tiles * KEYS > limit:
        _clear_values(values, stage, last * KEYS, limit, KEYS, HALVES)
    low = warpgroup_mma(packed, values.index(stage * HALVES), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(packed, values.index(stage * HALVES + 1), high, is_async=True)
        low, high, packed = warpgroup_mma_wait(0, deps=(low, high, packed))
    else:
        low, packed = warpgroup_mma_wait(0, deps=(low, packed))
    total = gl.convert_layout(total, gl.SliceLayout(1, out_layout))
    out_row = GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, out_layout))
    out_column = gl.arange(0, 64, gl.SliceLayout(0, out_layout))
    at = ((first_row + out_row).to(gl.int64) * HEADS + head) * DIM
    place = out + at[:, None] + out_column[None, :]
    inside = (out_row < count)[:, None]
    gl.store(place, (low / total[:, None]).to(dtype), mask=inside)
    if HALVES == 2:
        gl.store(place + 64, (high / total[:, None]).to(dtype), mask=inside)


@gluon.jit
def _fetch_tile(
    cache, buffers, ready, free, entries, tile, blocks, kv_head,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring one tile of keys or values; past the last block that one again."""
    stage = tile % STAGES
    mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), KEYS * HALVES * 128)
    for part in gl.static_range(KEYS // BLOCK_SIZE):
        index = gl.minimum(tile * (KEYS // BLOCK_SIZE) + part, blocks - 1)
        row = (gl.load(entries + index) * KV_HEADS + kv_head) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            target = buffers.index(stage * HALVES + half).slice(part * BLOCK_SIZE, BLOCK_SIZE)
            tma.async_copy_global_to_shared(cache, [row, half * 64], ready.index(stage), target)


@gluon.jit
def _fetch(
    key_cache, value_cache, keys, values, key_ready, key_free, value_ready, value_free, entries,
    limit, kv_head,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does: keys and values of positions 0 … limit - 1, tile by tile."""
    blocks = (limit + BLOCK_SIZE - 1) // BLOCK_SIZE
    for tile in range((limit + KEYS - 1) // KEYS):
        _fetch_tile(
            key_cache, keys, key_ready, key_free, entries, tile, blocks, kv_head,
            KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
        )  # fmt: skip
        _fetch_tile(
            value_cache, values, value_ready, value_free, entries, tile, blocks, kv_head,
            KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
        )  # fmt: skip


# One compiled kernel serves every call: nothing depends on these integers' values.
@gluon.jit(
    do_not_specialize=["table_stride", "max_tiles"],
    do_not_specialize_on_alignment=["tiles", "table"],
)
def _hopper_prefill_kernel(
    queries, tiles, table, key_cache, value_cache, out, scale, table_stride, max_tiles,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    tile = gl.num_programs(1) - 1 - gl.program_id(1)  # the longest of a chunk first
    head = gl.program_id(0)
    count = gl.load(tiles + max_tiles + tile)
    if count == 0:
        return
    HALVES: gl.constexpr = DIM // 64
    first_row = gl.load(tiles + tile)
    slot = gl.load(tiles + 2 * max_tiles + tile).to(gl.int64)
    first_position = gl.load(tiles + 3 * max_tiles + tile)
    kv_head = head // (HEADS // KV_HEADS)
    entries = table + slot * table_stride
    dtype: gl.constexpr = queries.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    first_query = gl.allocate_shared_memory(dtype, [HALVES, 64, 64], shared)
    second_query = gl.allocate_shared_memory(dtype, [HALVES, 64, 64], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, 64], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, 64], shared)
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (queries, out, first_query, keys, values, key_ready, key_free, value_ready,
                       value_free, first_row, count, first_position, head, scale,
                       HEADS, DIM, KEYS, STAGES, 0)),
            (_attend, (queries, out, second_query, keys, values, key_ready, key_free, value_ready,
                       value_free, first_row, count, first_position, head, scale,
                       HEADS, DIM, KEYS, STAGES, 1)),
            (_fetch, (key_cache, value_cache, keys, values, key_ready, key_free, value_ready,
                      value_free, entries, first_position + count, kv_head,
                      KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES)),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def why_not(dtype: torch.dtype, dim: int, block_size: int) -> str:
    """Why the kernel cannot attend over a cache of such blocks; empty if it can."""
    if dtype not in DTYPES:
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if dim not in (64, 128):
        return f"takes heads of 64 and 128, not {dim}"
    if block_size % 8 or _KEYS % block_size:
        return f"takes blocks of 8 to {_KEYS} in powers of two, not {block_size}"
    return ""


class HopperPrefillAttention:
    """The kernel, compiled, for caches whose addresses never change.

    The caches' descriptors are made once, and a launch goes past Triton's look-up of the compiled
    kernel: 47 µs with both on each launch. A descriptor is copied into every launch, and so into
    the graphs that record it.
    """

    def __init__(self, keys: Tensor, values: Tensor, heads: int) -> None:
        """keys, values: [L, num_blocks, Hkv, block_size, D], contiguous; heads: Hq.

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        _, _, kv_heads, block_size, dim = keys.shape
        layout = gl.NVMMASharedLayout(128, 16, 2)
        self._heads = heads
        self._caches = [
            [
                TensorDescriptor.from_tensor(cache.view(-1, dim), [block_size, 64], layout)
                for cache in caches
            ]
            for caches in zip(keys, values, strict=True)
        ]
        self._scale = dim**-0.5 * _LOG2_E
        self._constants = (
            heads, kv_heads, dim, block_size, _KEYS, _STAGES, _GROUP_REGISTERS, _FETCH_REGISTERS,
        )  # fmt: skip
        self._kernel = _hopper_prefill_kernel.warmup(
            keys.dtype, torch.int32, torch.int32, *self._caches[0], keys.dtype, self._scale, 1, 1,
            *self._constants, grid=(1,), num_warps=4, maxnreg=_REGISTERS,
        )  # fmt: skip
        self._kernel[heads, 1, 1]  # loads it

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None:
        """As ``prefill_attention`` over the caches of ``layer``. queries and out: contiguous,
        aligned to 16 bytes. Launched without early start, so it needs no wait of its own."""
        if num_tiles:
            self._kernel[self._heads, num_tiles, 1](
                queries, tiles, table, *self._caches[layer], out, self._scale, table.stride(0),
                tiles.shape[1], *self._constants,
            )  # fmt: skip
