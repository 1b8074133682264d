"""Causal attention of prefill chunks on Hopper's matrix unit, over the paged KV cache.

The tiles and the result are those of ``penstock.kernels.gpu.prefill_attention``; the reference of
both is the plain computation of ``penstock.kernels.attention``. A program computes
one tile of one query head, or in large steps several, one after the other: a warp fetches queries,
and tiles of keys and values, a block of the cache at a time, through the tensor memory accelerator,
ahead into the program's next item; two groups of four warps take half of the queries each
(``query_tile_hopper``). Of a tile of up to 64 rows, which would leave the second idle, they take
two heads that read the same keys and values.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperPrefillAttention`` fails.
Compute capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from penstock.kernels.gpu.attention_arguments import LayerTensors, binary_scales
from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.query_tile_hopper import (
    OUT,
    attend_tiles,
    cache_boxes,
    fetch_tile,
    rings,
)

DTYPES = (torch.bfloat16, torch.float16)
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
def _item(tiles, num_tiles, max_tiles, turn, HEADS: gl.constexpr, PAIRS: gl.constexpr):
    """What the program does in a turn: query head; slot, first row, rows and first position of the
    tile. No rows: nothing. PAIRS: heads of a tile of up to 64 rows go two at a time.

    The last tiles come first, and the programs take turns there and back, so that they end at about
    the same time where the tiles are sorted by their work."""
    program, programs = gl.program_id(0), gl.num_programs(0)
    at = turn * programs + gl.where(turn % 2 == 0, program, programs - 1 - program)
    tile = num_tiles - 1 - at // HEADS
    valid = tile >= 0
    count = gl.load(tiles + max_tiles + tile, mask=valid, other=0)
    first_row = gl.load(tiles + tile, mask=valid, other=0)
    slot = gl.load(tiles + 2 * max_tiles + tile, mask=valid, other=0)
    first_position = gl.load(tiles + 3 * max_tiles + tile, mask=valid, other=0)
    head = at % HEADS
    if PAIRS:
        count = gl.where((count <= 64) & (head % 2 == 1), 0, count)
    return head, slot, first_row, count, first_position


@gluon.jit
def _of_group(head, count, GROUP: gl.constexpr, PAIRS: gl.constexpr):
    """A group's head and the first query that is its own, in an item of ``count`` rows."""
    first = head * 0 + GROUP * 64
    if PAIRS:
        head += gl.where(count <= 64, GROUP, 0)
        first = gl.where(count <= 64, 0, first)
    return head, first


@gluon.jit
def _turns(num_tiles, HEADS: gl.constexpr):
    """Items that a program may have; some are empty."""
    programs = gl.num_programs(0)
    return (num_tiles * HEADS + programs - 1) // programs


@gluon.jit
def _attend_item(
    out, queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done,
    first_row, first, count, first_position, head, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """64 queries of one head, from query ``first`` of the tile on."""
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    dtype: gl.constexpr = out.dtype.element_ty
    positions = first_position + first + gl.arange(0, 64, gl.SliceLayout(1, score_layout))
    limit = first_position + count
    tiles = (limit + KEYS - 1) // KEYS
    # Tiles that every query sees whole need no mask.
    whole = gl.minimum((first_position + first + 1) // KEYS, tiles)
    _, row_sum, low, high = attend_tiles(
        queries, first_buffer, keys, values, key_ready, key_free, value_ready, value_free, done,
        tiles, whole, limit, positions, scale, DIM, KEYS, STAGES,
    )  # fmt: skip
    row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, OUT))
    out_row = first + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    out_column = gl.arange(0, 64, gl.SliceLayout(0, OUT))
    at = ((first_row + out_row).to(gl.int64) * HEADS + head) * DIM
    place = out + at[:, None] + out_column[None, :]
    inside = (out_row < count)[:, None]
    gl.store(place, (low / row_sum[:, None]).to(dtype), mask=inside)
    if DIM == 128:
        gl.store(place + 64, (high / row_sum[:, None]).to(dtype), mask=inside)


@gluon.jit
def _attend(
    out, queries, query_ready, query_free, keys, values, key_ready, key_free, value_ready,
    value_free, tiles, num_tiles, max_tiles, scale,
    HEADS: gl.constexpr, DIM: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
    GROUP: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does."""
    HALVES: gl.constexpr = DIM // 64
    done = num_tiles * 0
    taken = done
    head, _, first_row, count, first_position = _item(
        tiles, num_tiles, max_tiles, done, HEADS, PAIRS
    )
    for turn in range(_turns(num_tiles, HEADS)):
        # Read early: the item after this one.
        next_head, _, next_row, next_count, next_position = _item(
            tiles, num_tiles, max_tiles, turn + 1, HEADS, PAIRS
        )
        if count > 0:
            buffer = taken % 2
            mbarrier.wait(query_ready.index(buffer), (taken // 2) & 1)
            group_head, first = _of_group(head, count, GROUP, PAIRS)
            _attend_item(
                out, queries, (buffer * 2 + GROUP) * HALVES, keys, values, key_ready, key_free,
                value_ready, value_free, done, first_row, first, count, first_position, group_head,
                scale, HEADS, DIM, KEYS, STAGES,
            )  # fmt: skip
            mbarrier.arrive(query_free.index(buffer))
            done += (first_position + count + KEYS - 1) // KEYS
            taken += 1
        head, first_row, count, first_position = next_head, next_row, next_count, next_position


@gluon.jit
def _fetch(
    query_box, key_cache, value_cache, queries, query_ready, query_free, keys, values, key_ready,
    key_free, value_ready, value_free, tiles, num_tiles, max_tiles, table, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, DIM: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, PAIRS: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does: of each item the queries, then keys and values of all positions
    up to the tile's last, tile by tile."""
    HALVES: gl.constexpr = DIM // 64
    done = num_tiles * 0
    taken = done
    for turn in range(_turns(num_tiles, HEADS)):
        head, slot, first_row, count, first_position = _item(
            tiles, num_tiles, max_tiles, turn, HEADS, PAIRS
        )
        if count > 0:
            buffer = taken % 2
            mbarrier.wait(query_free.index(buffer), ((taken // 2) & 1) ^ 1)
            mbarrier.expect(query_ready.index(buffer), 2 * 64 * DIM * 2)
            for part in gl.static_range(2 * HALVES):
                group_head, first = _of_group(head, count, part // HALVES, PAIRS)
                # Rows behind the tile's own are read, too, and not used.
                place = [first_row + first, group_head * DIM + part % HALVES * 64]
                target = queries.index(buffer * 2 * HALVES + part)
                tma.async_copy_global_to_shared(query_box, place, query_ready.index(buffer), target)
            entries = table + slot.to(gl.int64) * table_stride
            kv_head = head // (HEADS // KV_HEADS)
            limit = first_position + count
            blocks = (limit + BLOCK_SIZE - 1) // BLOCK_SIZE
            first_buffer = (limit + KEYS - 1) // KEYS
            for tile in range(first_buffer):
                fetch_tile(
                    key_cache, keys, key_ready, key_free, entries, done, tile, blocks, kv_head,
                    KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
                )  # fmt: skip
                fetch_tile(
                    value_cache, values, value_ready, value_free, entries, done, tile, blocks,
                    kv_head, KV_HEADS, BLOCK_SIZE, KEYS, HALVES, STAGES,
                )  # fmt: skip
            done += first_buffer
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
    PAIRS: gl.constexpr = HEADS // KV_HEADS % 2 == 0
    dtype: gl.constexpr = out.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [4 * HALVES, 64, 64], shared)
    query_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    query_free = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(query_ready.index(buffer), count=1)
        mbarrier.init(query_free.index(buffer), count=2)
    keys, values, key_ready, key_free, value_ready, value_free = rings(dtype, KEYS, HALVES, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (out, queries, query_ready, query_free, keys, values, key_ready, key_free,
                       value_ready, value_free, tiles, num_tiles, max_tiles, scale,
                       HEADS, DIM, KEYS, STAGES, 0, PAIRS)),
            (_attend, (out, queries, query_ready, query_free, keys, values, key_ready, key_free,
                       value_ready, value_free, tiles, num_tiles, max_tiles, scale,
                       HEADS, DIM, KEYS, STAGES, 1, PAIRS)),
            (_fetch, (query_box, key_cache, value_cache, queries, query_ready, query_free, keys,
                      values, key_ready, key_free, value_ready, value_free, tiles, num_tiles,
                      max_tiles, table, table_stride,
                      HEADS, KV_HEADS, DIM, BLOCK_SIZE, KEYS, STAGES, PAIRS)),
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


class PrefillConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    dim: int
    block_size: int
    keys: int
    stages: int
    group_registers: int
    fetch_registers: int


class HopperPrefillAttention:
    """The kernel, compiled, for caches and a buffer of queries whose addresses never change.

    Their descriptors are made once, and a launch goes past Triton's look-up of the compiled kernel:
    47 µs with both on each launch. A descriptor is copied into every launch, and so into the graphs
    that record it.
    """

    def __init__(
        self,
        keys: LayerTensors,
        values: LayerTensors,
        queries: Tensor,
        scales: Sequence[float] = (),
    ) -> None:
        """keys, values: of each layer; queries: [T, Hq, D], contiguous; scales: what scores of each
        layer are multiplied by, by default 1 / sqrt(D).

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        _, kv_heads, block_size, dim = keys[0].shape
        layout = gl.NVMMASharedLayout(128, 16, 2)
        heads = queries.shape[1]
        self._heads, self._queries = heads, queries
        self._box = TensorDescriptor.from_tensor(queries.flatten(1), [64, 64], layout)
        self._multiprocessors = multiprocessors()
        self._caches = cache_boxes(keys, values)
        self._scales = binary_scales(scales, len(keys), dim)
        self._constants = PrefillConstants(
            heads, kv_heads, dim, block_size, _KEYS, _STAGES, _GROUP_REGISTERS, _FETCH_REGISTERS
        )
        self._kernel = _hopper_prefill_kernel.warmup(
            self._box, torch.int32, torch.int32, *self._caches[0], keys[0].dtype, self._scales[0],
            1, 1, 1, *self._constants, grid=(1,), num_warps=4, maxnreg=_REGISTERS,
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
                self._box, tiles, table, *self._caches[layer], out, self._scales[layer],
                table.stride(0), num_tiles, tiles.shape[1], *self._constants,
            )  # fmt: skip
