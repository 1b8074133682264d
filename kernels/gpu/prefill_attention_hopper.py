"""Causal attention of prefill chunks on Hopper's matrix unit, over the paged KV cache.

The tiles and the result are those of ``penstock.kernels.gpu.prefill_attention``. A program computes
one tile of one query head, or in large steps several, one after the other: a warp fetches queries,
and tiles of keys and values, a block of the cache at a time, through the tensor memory accelerator,
ahead into the program's next item; two groups of four warps take half of the queries each. A group
starts the product with the next keys before that with the values at hand, and computes the next
weights while the latter runs. Source of these ideas: FlashAttention-3 (Shah et al., 2024).

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
_LARGE_ROWS = 4096
"""From so many rows of a step on a multiprocessor has one program for all its items: what begins
and ends an item overlaps then (two chunks of 4,096, 16 heads: 594 TFLOP/s in place of 525). In
smaller steps each item has a program of its own, for which the device finds room as decode
attention beside it ends."""


@gluon.jit
def _scores(
    queries, own, keys, stage, KEYS: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr
):
    """Start 64 queries, in the buffers from ``own`` on, times a tile of keys: [64, KEYS]."""
    score = gl.zeros([64, KEYS], gl.float32, layout)
    for half in gl.static_range(HALVES):
        score = warpgroup_mma(
            queries.index(own + half), keys.index(stage * HALVES + half).permute((1, 0)), score,
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
    queries, own, keys, values, key_ready, key_free, value_ready, value_free, done, tile, top,
    total, packed, low, high, positions, scale,
    KEYS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    score_layout: gl.constexpr, out_layout: gl.constexpr, weight_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``tile``; the values of the tile before, by its weights ``packed``. done:
    tiles of the program's items before."""
    stage = (done + tile) % STAGES
    before = (done + tile - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), ((done + tile) // STAGES) & 1)
    score = _scores(queries, own, keys, stage, KEYS, HALVES, score_layout)
    mbarrier.wait(value_ready.index(before), ((done + tile - 1) // STAGES) & 1)
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
def _item(tiles, num_tiles, max_tiles, turn, HEADS: gl.constexpr):
    """What the program does in a turn: query head; slot, first row, rows and first position of the
    tile. No rows: nothing. The last tiles come first, and the programs take turns there and back,
    so that they end at about the same time where the tiles are sorted by their work."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    at = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    tile = num_tiles - 1 - at // HEADS
    there = tile >= 0
    count = gl.load(tiles + max_tiles + tile, mask=there, other=0)
    first_row = gl.load(tiles + tile, mask=there, other=0)
    slot = gl.load(tiles + 2 * max_tiles + tile, mask=there, other=0)
    first_position = gl.load(tiles + 3 * max_tiles + tile, mask=there, other=0)
    return at % HEADS, slot, first_row, count, first_position


@gluon.jit
def _turns(num_tiles, HEADS: gl.constexpr):
    programs = gl.num_programs(0)
    return (num_tiles * HEADS + programs - 1) // programs


@gluon.jit
def _attend_item(
    out, queries, own, keys, values, key_ready, key_free, value_ready, value_free, done, first_row,
    count, first_position, head, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Heads of 128 are two halves of 64 in shared memory, and two accumulators."""
    HALVES: gl.constexpr = DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, out_layout, 2)
    dtype: gl.constexpr = out.dtype.element_ty
    positions = first_position + GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
    limit = first_position + count
    tiles = (limit + KEYS - 1) // KEYS
    # Tiles that every query sees whole need no mask.
    whole = gl.minimum((first_position + GROUP * 64 + 1) // KEYS, tiles)
    top = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    total = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
    low = gl.zeros([64, 64], gl.float32, out_layout)
    high = gl.zeros([64, 64], gl.float32, out_layout)

    stage = done % STAGES
    mbarrier.wait(key_ready.index(stage), (done // STAGES) & 1)
    score = _scores(queries, own, keys, stage, KEYS, HALVES, score_layout)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(key_free.index(stage))
    top, total, _, weight = _weights(
        score, top, total, 0, positions, scale, KEYS, True, score_layout
    )
    packed = gl.convert_layout(weight.to(dtype), weight_layout)
    for tile in range(1, whole):
        top, total, packed, low, high = _turn(
            queries, own, keys, values, key_ready, key_free, value_ready, value_free, done, tile,
            top, total, packed, low, high, positions, scale, KEYS, HALVES, STAGES, False,
            score_layout, out_layout, weight_layout,
        )  # fmt: skip
    for tile in range(gl.maximum(whole, 1), tiles):
        top, total, packed, low, high = _turn(
            queries, own, keys, values, key_ready, key_free, value_ready, value_free, done, tile,
            top, total, packed, low, high, positions, scale, KEYS, HALVES, STAGES, True,
            score_layout, out_layout, weight_layout,
        )  # fmt: skip

    last = done + tiles - 1
    stage = last % STAGES
    mbarrier.wait(value_ready.index(stage), (last // STAGES) & 1)
    if tiles * KEYS > limit:
        _clear_values(values, stage, (tiles - 1) * KEYS, limit, KEYS, HALVES)
    low = warpgroup_mma(packed, values.index(stage * HALVES), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(packed, values.index(stage * HALVES + 1), high, is_async=True)
        low, high, packed = warpgroup_mma_wait(0, deps=(low, high, packed))
    else:
        low, packed = warpgroup_mma_wait(0, deps=(low, packed))
    mbarrier.arrive(value_free.index(stage))
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
def _attend(
    out, queries, query_ready, query_free, keys, values, key_ready, key_free, value_ready,
    value_free, tiles, num_tiles, max_tiles, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: queries 64 * GROUP … of each tile."""
    HALVES: gl.constexpr = DIM // 64
    done = num_tiles * 0
    taken = done
    head, _, first_row, count, first_position = _item(tiles, num_tiles, max_tiles, done, HEADS)
    for turn in range(_turns(num_tiles, HEADS)):
        # Read early: the item after this one.
        next_head, _, next_row, next_count, next_position = _item(
            tiles, num_tiles, max_tiles, turn + 1, HEADS
        )
        if count > 0:
            buffer = taken % 2
            mbarrier.wait(query_ready.index(buffer), (taken // 2) & 1)
            _attend_item(
                out, queries, (buffer * 2 + GROUP) * HALVES, keys, values, key_ready, key_free,
                value_ready, value_free, done, first_row, count, first_position, head, scale,
                HEADS, DIM, KEYS, STAGES, GROUP,
            )  # fmt: skip
            mbarrier.arrive(query_free.index(buffer))
            done += (first_position + count + KEYS - 1) // KEYS
            taken += 1
        head, first_row, count, first_position = next_head, next_row, next_count, next_position


@gluon.jit
def _fetch_tile(
    cache, buffers, ready, free, entries, done, tile, blocks, kv_head,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring one tile of keys or values; past the last block that one again."""
    stage = (done + tile) % STAGES
    mbarrier.wait(free.index(stage), (((done + tile) // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), KEYS * HALVES * 128)
    for part in gl.static_range(KEYS // BLOCK_SIZE):
        index = gl.minimum(tile * (KEYS // BLOCK_SIZE) + part, blocks - 1)
        row = (gl.load(entries + index) * KV_HEADS + kv_head) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            target = buffers.index(stage * HALVES + half).slice(part * BLOCK_SIZE, BLOCK_SIZE)
            tma.async_copy_global_to_shared(cache, [row, half * 64], ready.index(stage), target)


@gluon.jit
def _fetch(
    query_box, key_cache, value_cache, queries, query_ready, query_free, keys, values, key_ready,
    key_free, value_ready, value_free, tiles, num_tiles, max_tiles, table, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does: of each item the queries, then keys and values of all positions
    up to the tile's last, tile by tile."""
    HALVES: gl.constexpr = DIM // 64
    done = num_tiles * 0
    taken = done
    for turn in range(_turns(num_tiles, HEADS)):
        head, slot, first_row, count, first_position = _item(
            tiles, num_tiles, max_tiles, turn, HEADS
        )
        if count > 0:
            buffer = taken % 2
            mbarrier.wait(query_free.index(buffer), ((taken // 2) & 1) ^ 1)
            mbarrier.expect(query_ready.index(buffer), 2 * 64 * DIM * 2)
            for part in gl.static_range(2 * HALVES):
                # Rows behind the tile's own are read, too, and not used.
                place = [first_row + part // HALVES * 64, head * DIM + part % HALVES * 64]
                target = queries.index(buffer * 2 * HALVES + part)
                tma.async_copy_global_to_shared(query_box, place, query_ready.index(buffer), target)
            entries = table + slot.to(gl.int64) * table_stride
            kv_head = head // (HEADS // KV_HEADS)
            limit = first_position + count
            blocks = (limit + BLOCK_SIZE - 1) // BLOCK_SIZE
            own = (limit + KEYS - 1) // KEYS
            for tile in range(own):
                _fetch_tile(
                    key_cache, keys, key_ready, key_free, entries, done, tile, blocks, kv_head,
                    KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
                )  # fmt: skip
                _fetch_tile(
                    value_cache, values, value_ready, value_free, entries, done, tile, blocks,
                    kv_head, KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
                )  # fmt: skip
            done += own
            taken += 1


# One compiled kernel serves every call: nothing depends on these integers' values.
@gluon.jit(
    do_not_specialize=["table_stride", "num_tiles", "max_tiles"],
    do_not_specialize_on_alignment=["tiles", "table"],
)
def _hopper_prefill_kernel(
    query_box, tiles, table, key_cache, value_cache, out, scale, table_stride, num_tiles, max_tiles,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, GROUP_REGISTERS: gl.constexpr,
    FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    HALVES: gl.constexpr = DIM // 64
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [4 * HALVES, 64, 64], shared)
    keys = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, 64], shared)
    values = gl.allocate_shared_memory(dtype, [STAGES * HALVES, KEYS, 64], shared)
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    key_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    key_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    value_free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(query_ready.index(buffer), count=1)
        mbarrier.init(query_free.index(buffer), count=2)
    for stage in gl.static_range(STAGES):
        mbarrier.init(key_ready.index(stage), count=1)
        mbarrier.init(value_ready.index(stage), count=1)
        mbarrier.init(key_free.index(stage), count=2)
        mbarrier.init(value_free.index(stage), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (out, queries, query_ready, query_free, keys, values, key_ready, key_free,
                       value_ready, value_free, tiles, num_tiles, max_tiles, scale,
                       HEADS, DIM, KEYS, STAGES, 0)),
            (_attend, (out, queries, query_ready, query_free, keys, values, key_ready, key_free,
                       value_ready, value_free, tiles, num_tiles, max_tiles, scale,
                       HEADS, DIM, KEYS, STAGES, 1)),
            (_fetch, (query_box, key_cache, value_cache, queries, query_ready, query_free, keys,
                      values, key_ready, key_free, value_ready, value_free, tiles, num_tiles,
                      max_tiles, table, table_stride,
                      HEADS, KV_HEADS, DIM, BLOCK_SIZE, KEYS, STAGES)),
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
    """The kernel, compiled, for caches and a buffer of queries whose addresses never change.

    Their descriptors are made once, and a launch goes past Triton's look-up of the compiled kernel:
    47 µs with both on each launch. A descriptor is copied into every launch, and so into the graphs
    that record it.
    """

    def __init__(self, keys: Tensor, values: Tensor, queries: Tensor) -> None:
        """keys, values: [L, num_blocks, Hkv, block_size, D], queries: [T, Hq, D]; contiguous.

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        _, _, kv_heads, block_size, dim = keys.shape
        layout = gl.NVMMASharedLayout(128, 16, 2)
        heads = queries.shape[1]
        self._heads, self._queries = heads, queries
        self._box = TensorDescriptor.from_tensor(queries.flatten(1), [64, 64], layout)
        properties = torch.cuda.get_device_properties(keys.device)
        self._multiprocessors = properties.multi_processor_count
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
            self._box, torch.int32, torch.int32, *self._caches[0], keys.dtype, self._scale, 1, 1, 1,
            *self._constants, grid=(1,), num_warps=4, maxnreg=_REGISTERS,
        )  # fmt: skip
        self._kernel[1, 1, 1]  # loads it

    def __call__(
        self, layer: int, queries: Tensor, tiles: Tensor, num_tiles: int, table: Tensor, out: Tensor
    ) -> None:
        """As ``prefill_attention`` over the caches of ``layer``; queries: the first rows of the
        buffer. out: contiguous, aligned to 16 bytes. Launched without early start, so it needs no
        wait of its own."""
        if queries.data_ptr() != self._queries.data_ptr():
            raise ValueError("queries are read from the buffer that the kernel was compiled for")
        if num_tiles:
            items = self._heads * num_tiles
            programs = items if len(out) < _LARGE_ROWS else min(items, self._multiprocessors)
            self._kernel[programs, 1, 1](
                self._box, tiles, table, *self._caches[layer], out, self._scale, table.stride(0),
                num_tiles, tiles.shape[1], *self._constants,
            )  # fmt: skip
