"""A tile of 64 queries attends to tiles of keys and values on Hopper: device functions.

A warp brings keys and values, a block of the cache at a time, through the tensor memory
accelerator into rings of ``STAGES`` tiles; groups of four warps take 64 queries each. A group
starts the product with the next keys before that with the values at hand, and computes the next
weights while the latter runs. Source of these ideas: FlashAttention-3 (Shah et al., 2024).

Heads of 128 are two halves of 64 in shared memory, and two accumulators. Reference:
``penstock.kernels.attention``.
"""

from __future__ import annotations

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

from penstock.kernels.gpu.attention_arguments import LayerTensors
from penstock.kernels.gpu.device_functions_hopper import softmax_step

OUT = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 16]))
"""Where the weighted sums of 64 queries lie, 64 columns each."""


def cache_boxes(keys: LayerTensors, values: LayerTensors) -> list[list[TensorDescriptor]]:
    """For each layer, the descriptors by which ``fetch_tile`` brings keys and values: 64 columns of
    a block each."""
    *_, block_size, dim = keys[0].shape
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return [
        [
            TensorDescriptor.from_tensor(cache.view(-1, dim), [block_size, 64], layout)
            for cache in caches
        ]
        for caches in zip(keys, values, strict=True)
    ]


@gluon.jit
def rings(dtype: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr):
    """Empty rings of keys and of values for two groups, and barriers of their tiles: ready and free
    of keys, then of values. The caller fences."""
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
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
    return keys, values, key_ready, key_free, value_ready, value_free


@gluon.jit
def _scores(
    queries, first_buffer, keys, stage,
    KEYS: gl.constexpr, HALVES: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """Start 64 queries, which begin in ``first_buffer``, times a tile of keys: [64, KEYS]."""
    score = gl.zeros([64, KEYS], gl.float32, layout)
    for half in gl.static_range(HALVES):
        score = warpgroup_mma(
            queries.index(first_buffer + half), keys.index(stage * HALVES + half).permute((1, 0)),
            score, use_acc=half > 0, is_async=True,
        )  # fmt: skip
    return score


@gluon.jit
def _weights(
    score, row_max, row_sum, start, positions, scale,
    KEYS: gl.constexpr, MASKED: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: maximum, sum, factor of what was summed before, weights."""
    if MASKED:
        position = start + gl.arange(0, KEYS, gl.SliceLayout(0, layout))
        seen = position[None, :] <= positions[:, None]
        score = gl.where(seen, score, float("-inf"))
    return softmax_step(score, row_max, row_sum, scale, 1)


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
    queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done, tile,
    row_max, row_sum, packed, low, high, positions, scale,
    KEYS: gl.constexpr, HALVES: gl.constexpr, STAGES: gl.constexpr, MASKED: gl.constexpr,
    score_layout: gl.constexpr, out_layout: gl.constexpr, weight_layout: gl.constexpr,
):  # fmt: skip
    """Scores of tile ``tile``; the values of the tile before, by its weights ``packed``. done:
    tiles of the program's items before."""
    stage = (done + tile) % STAGES
    before = (done + tile - 1) % STAGES
    mbarrier.wait(key_ready.index(stage), ((done + tile) // STAGES) & 1)
    score = _scores(queries, first_buffer, keys, stage, KEYS, HALVES, score_layout)
    mbarrier.wait(value_ready.index(before), ((done + tile - 1) // STAGES) & 1)
    low = warpgroup_mma(packed, values.index(before * HALVES), low, is_async=True)
    if HALVES == 2:
        high = warpgroup_mma(packed, values.index(before * HALVES + 1), high, is_async=True)
    score = warpgroup_mma_wait(HALVES, deps=(score,))
    mbarrier.arrive(key_free.index(stage))
    row_max, row_sum, decay, weight = _weights(
        score, row_max, row_sum, tile * KEYS, positions, scale, KEYS, MASKED, score_layout
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
    return row_max, row_sum, following, low, high


@gluon.jit
def attend_tiles(
    queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done, tiles,
    whole, limit, positions, scale,
    DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries over ``tiles`` tiles, at least one; the rings have had ``done`` before those.

    queries: [n, 64, 64], the group's from ``first_buffer`` on, a buffer for each 64 columns; keys,
    values: [STAGES * DIM / 64, KEYS, 64]. positions: [64] int32 as the rows of [64, KEYS] scores,
    the last that each query sees; the first is 0. whole: so many tiles every query sees whole;
    limit: positions that hold anything. scale: of scores, times log2(e). Returns highest scores
    (binary logarithm) and sums of weights, both as ``positions``, and the weighted sums of values,
    in ``OUT``: [64, 64] fp32 twice, of which heads of 64 use the first.

    All groups of a program take the same tiles up to the same limit, and the barriers of free
    buffers count the groups.
    """
    HALVES: gl.constexpr = DIM // 64
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    weight_layout: gl.constexpr = gl.DotOperandLayout(0, OUT, 2)
    row_max = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, score_layout))
    row_sum = gl.zeros([64], gl.float32, gl.SliceLayout(1, score_layout))
    low = gl.zeros([64, 64], gl.float32, OUT)
    high = gl.zeros([64, 64], gl.float32, OUT)

    stage = done % STAGES
    mbarrier.wait(key_ready.index(stage), (done // STAGES) & 1)
    score = _scores(queries, first_buffer, keys, stage, KEYS, HALVES, score_layout)
    score = warpgroup_mma_wait(0, deps=(score,))
    mbarrier.arrive(key_free.index(stage))
    row_max, row_sum, _, weight = _weights(
        score, row_max, row_sum, 0, positions, scale, KEYS, True, score_layout
    )
    packed = gl.convert_layout(weight.to(queries.dtype), weight_layout)
    for tile in range(1, whole):
        row_max, row_sum, packed, low, high = _turn(
            queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done,
            tile, row_max, row_sum, packed, low, high, positions, scale, KEYS, HALVES, STAGES,
            False, score_layout, OUT, weight_layout,
        )  # fmt: skip
    for tile in range(gl.maximum(whole, 1), tiles):
        row_max, row_sum, packed, low, high = _turn(
            queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done,
            tile, row_max, row_sum, packed, low, high, positions, scale, KEYS, HALVES, STAGES, True,
            score_layout, OUT, weight_layout,
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
    return row_max, row_sum, low, high


@gluon.jit
def fetch_tile(
    cache, buffers, ready, free, entries, done, tile, blocks, kv_head,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Bring one tile of keys or values; past the last of ``blocks``, at least one, that one again.
    entries: of the block table, from tile 0 on; done: as for ``attend_tiles``."""
    stage = (done + tile) % STAGES
    mbarrier.wait(free.index(stage), (((done + tile) // STAGES) & 1) ^ 1)
    mbarrier.expect(ready.index(stage), KEYS * HALVES * 128)
    for part in gl.static_range(KEYS // BLOCK_SIZE):
        index = gl.minimum(tile * (KEYS // BLOCK_SIZE) + part, blocks - 1)
        row = (gl.load(entries + index) * KV_HEADS + kv_head) * BLOCK_SIZE
        for half in gl.static_range(HALVES):
            target = buffers.index(stage * HALVES + half).slice(part * BLOCK_SIZE, BLOCK_SIZE)
            tma.async_copy_global_to_shared(cache, [row, half * 64], ready.index(stage), target)
