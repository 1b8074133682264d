"""Attention over a prefix that decode rows share, on Hopper's matrix unit.

The result is that of ``penstock.kernels.gpu.shared_prefix``; the reference of both is the plain
computation of ``penstock.kernels.attention`` without a shared prefix. A program computes one part
of the prefix for 128 queries to one KV head: a warp brings tiles of keys and values, two groups of
four warps take 64 queries each (``query_tile_hopper``).

Block tables, lengths and what earlier steps wrote are read before the program waits for the kernel
ahead of it, K and V by the fetching warp, which never waits. That is right as in
``decode_splits_hopper``; also without a plan ahead, where the Triton kernel of decode attention
follows: a step's first kernel (``slots.embed``) lets nothing start before it has waited, and each
behind it waits for the one ahead. The kernel behind this one starts as ``shared_prefix`` says.

Written in Gluon, Triton's language of explicit layouts, which is experimental: with a Triton that
lacks it or has changed it, importing this module or making a ``HopperPrefixAttention`` fails.
Compute capability 9.0 alone. The interpreter cannot run it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from penstock.kernels.gpu.attention_arguments import (
    DecodeBatch,
    HeadInputs,
    LayerTensors,
    binary_scales,
)
from penstock.kernels.gpu.device_functions_hopper import rms_scale
from penstock.kernels.gpu.query_tile_hopper import (
    OUT,
    attend_tiles,
    cache_boxes,
    fetch_tile,
    rings,
)
from penstock.kernels.gpu.shared_prefix import SharedPrefix, parts_for
from penstock.kernels.gpu.shared_prefix import why_not as why_no_kernel

_QUERIES = 128
"""Queries of a program; the kernel is written for two groups of 64."""
# Keys in a tile, tiles under way: on an H200, 256 rows of Qwen3-8B behind 2,048 positions take 21
# µs a layer, with decode attention behind it 63; two tiles of 128: 21 and 70; eight of 32: 27, 68.
_KEYS = 64
_STAGES = 4
# Of 64 Ki registers, as in prefill attention.
_REGISTERS = 168
_GROUP_REGISTERS = 240
_FETCH_REGISTERS = 24


@gluon.jit
def _query_rows(
    rows, shared_lengths, count, query, PADDED: gl.constexpr, SHARED: gl.constexpr,
    QUERIES: gl.constexpr,
):  # fmt: skip
    """Row, head and slot of the program's queries, and whether they take part."""
    row = gl.program_id(0) * (QUERIES // PADDED) + query // PADDED
    head = query % PADDED
    slot = gl.load(rows + row, mask=row < count, other=-1)
    shared = gl.load(shared_lengths + slot, mask=slot >= 0, other=0)
    return row, head, slot, (shared > 0) & (head < SHARED)


@gluon.jit
def _attend(
    qkv, rows, last_position, shared_lengths, cos, sin, query_weight, partial, partial_sums,
    queries, keys, values, key_ready, key_free, value_ready, value_free, positions, tiles, count,
    scale, eps,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PADDED: gl.constexpr, QUERIES: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """What a group of four warps does: its queries over ``tiles`` tiles of ``positions``."""
    SHARED: gl.constexpr = HEADS // KV_HEADS
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, KEYS, 16])
    kv_head = gl.program_id(1)
    part = gl.program_id(2)
    parts = gl.num_programs(2)
    query = GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, wide))
    row, head, slot, valid = _query_rows(
        rows, shared_lengths, count, query, PADDED, SHARED, QUERIES
    )
    half = gl.arange(0, 64, gl.SliceLayout(0, wide))[None, :]
    position = gl.load(last_position + slot, mask=valid, other=0)
    angle = position.to(gl.int64)[:, None] * 64 + half
    inside = valid[:, None]
    c = gl.load(cos + angle, mask=inside, other=0.0)
    s = gl.load(sin + angle, mask=inside, other=0.0)
    source = (row.to(gl.int64) * (HEADS + 2 * KV_HEADS) + kv_head * SHARED + head) * 128
    source = qkv + source[:, None] + half
    tl.extra.cuda.gdc_wait()
    tl.extra.cuda.gdc_launch_dependents()
    first = gl.load(source, mask=inside, other=0.0).to(gl.float32)
    second = gl.load(source + 64, mask=inside, other=0.0).to(gl.float32)
    if NORM:
        square_sum = gl.sum(first * first, 1) + gl.sum(second * second, 1)
        factor = rms_scale(square_sum, eps, 128)[:, None]
        first *= factor * gl.load(query_weight + half).to(gl.float32)
        second *= factor * gl.load(query_weight + 64 + half).to(gl.float32)
    dtype: gl.constexpr = queries.dtype
    # Not by ``rotated_halves``: a half is stored before the other is computed.
    queries.index(GROUP * 2).store((first * c - second * s).to(dtype))
    queries.index(GROUP * 2 + 1).store((second * c + first * s).to(dtype))
    fence_async_shared()

    query = GROUP * 64 + gl.arange(0, 64, gl.SliceLayout(1, OUT))
    row, head, _, valid = _query_rows(rows, shared_lengths, count, query, PADDED, SHARED, QUERIES)
    to = ((row.to(gl.int64) * KV_HEADS + kv_head) * parts + part) * SHARED + head
    column = gl.arange(0, 64, gl.SliceLayout(0, OUT))[None, :]
    place = partial + to[:, None] * 128 + column
    inside = valid[:, None]
    if tiles > 0:
        last = gl.full([64], 0, gl.int32, gl.SliceLayout(1, score_layout)) + (positions - 1)
        row_max, row_sum, low, high = attend_tiles(
            queries, GROUP * 2, keys, values, key_ready, key_free, value_ready, value_free,
            tiles * 0, tiles, positions // KEYS, positions, last, scale, 128, KEYS, STAGES,
        )  # fmt: skip
        gl.store(place, low, mask=inside)
        gl.store(place + 64, high, mask=inside)
        gl.store(
            partial_sums + 2 * to, gl.convert_layout(row_max, gl.SliceLayout(1, OUT)), mask=valid
        )
        row_sum = gl.convert_layout(row_sum, gl.SliceLayout(1, OUT))
        gl.store(partial_sums + 2 * to + 1, row_sum, mask=valid)
    else:
        # A part without positions has weight 0.
        nothing = gl.zeros([64, 64], gl.float32, OUT)
        gl.store(place, nothing, mask=inside)
        gl.store(place + 64, nothing, mask=inside)
        none = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, OUT))
        gl.store(partial_sums + 2 * to, none, mask=valid)
        gl.store(partial_sums + 2 * to + 1, gl.zeros_like(none), mask=valid)


@gluon.jit
def _fetch(
    key_box, value_box, keys, values, key_ready, key_free, value_ready, value_free, entries,
    positions, tiles,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """What the fetching warp does."""
    kv_head = gl.program_id(1)
    blocks = positions // BLOCK_SIZE
    for tile in range(tiles):
        fetch_tile(
            key_box, keys, key_ready, key_free, entries, 0, tile, blocks, kv_head,
            KV_HEADS, BLOCK_SIZE, KEYS, 2, STAGES,
        )  # fmt: skip
        fetch_tile(
            value_box, values, value_ready, value_free, entries, 0, tile, blocks, kv_head,
            KV_HEADS, BLOCK_SIZE, KEYS, 2, STAGES,
        )  # fmt: skip


# One compiled kernel serves every number of rows and parts.
@gluon.jit(
    do_not_specialize=["count", "table_stride"],
    do_not_specialize_on_alignment=["shared_slot", "shared_lengths", "rows"],
)
def _hopper_prefix_kernel(
    qkv, rows, last_position, shared_slot, shared_lengths, table, cos, sin, query_weight, key_box,
    value_box, partial, partial_sums, count, scale, eps, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, PADDED: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    QUERIES: gl.constexpr, KEYS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr,
    GROUP_REGISTERS: gl.constexpr, FETCH_REGISTERS: gl.constexpr,
):  # fmt: skip
    leader = gl.load(shared_slot)
    length = gl.load(shared_lengths + leader, mask=leader >= 0, other=0)
    query = gl.arange(0, QUERIES, gl.BlockedLayout([1], [32], [4], [0]))
    _, _, _, valid = _query_rows(
        rows, shared_lengths, count, query, PADDED, HEADS // KV_HEADS, QUERIES
    )
    length = gl.where(gl.max(valid.to(gl.int32), 0) > 0, length, 0)
    entries = table + leader.to(gl.int64) * table_stride
    each = gl.cdiv(gl.cdiv(length, KEYS), gl.num_programs(2)) * KEYS
    begin = gl.program_id(2) * each
    positions = gl.minimum(gl.maximum(length - begin, 0), each)
    tiles = gl.cdiv(positions, KEYS)
    entries += begin // BLOCK_SIZE

    dtype: gl.constexpr = qkv.dtype.element_ty
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    queries = gl.allocate_shared_memory(dtype, [4, 64, 64], shared)
    keys, values, key_ready, key_free, value_ready, value_free = rings(dtype, KEYS, 2, STAGES)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (qkv, rows, last_position, shared_lengths, cos, sin, query_weight, partial,
                       partial_sums, queries, keys, values, key_ready, key_free, value_ready,
                       value_free, positions, tiles, count, scale, eps,
                       HEADS, KV_HEADS, PADDED, QUERIES, KEYS, STAGES, NORM, 0)),
            (_attend, (qkv, rows, last_position, shared_lengths, cos, sin, query_weight, partial,
                       partial_sums, queries, keys, values, key_ready, key_free, value_ready,
                       value_free, positions, tiles, count, scale, eps,
                       HEADS, KV_HEADS, PADDED, QUERIES, KEYS, STAGES, NORM, 1)),
            (_fetch, (key_box, value_box, keys, values, key_ready, key_free, value_ready,
                      value_free, entries, positions, tiles,
                      KV_HEADS, BLOCK_SIZE, KEYS, STAGES)),
        ],
        [4, 1],
        [GROUP_REGISTERS, FETCH_REGISTERS],
    )  # fmt: skip


def why_not(dtype: torch.dtype, dim: int, block_size: int, shared: int) -> str:
    """Why the kernel cannot attend over such a cache; empty if it can. shared: Hq / Hkv."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 and float16, not {str(dtype).removeprefix('torch.')}"
    if dim != 128:
        return f"takes heads of 128, not {dim}"
    if block_size % 8 or _KEYS % block_size:
        return f"takes blocks of 8 to {_KEYS} in powers of two, not {block_size}"
    return why_no_kernel(shared)


class PrefixConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    padded: int
    """Query heads for a KV head, filled up to a power of two."""
    block_size: int
    queries: int
    keys: int
    stages: int
    norm: bool
    group_registers: int
    fetch_registers: int


class HopperPrefixAttention:
    """The kernel, compiled, for caches whose addresses never change.

    Their descriptors are made once, and a launch goes past Triton's look-up of the compiled kernel.
    """

    def __init__(
        self,
        keys: LayerTensors,
        values: LayerTensors,
        heads: int,
        norm: bool,
        eps: float,
        prefix: SharedPrefix,
        scales: Sequence[float] = (),
    ) -> None:
        """keys, values: of each layer; heads: Hq; norm: whether queries are normed, with eps;
        prefix: where the rows' parts go; scales: of each layer's scores, by default 1 / sqrt(D).

        Raises what Triton raises where it cannot compile or load the kernel.
        """
        _, kv_heads, block_size, dim = keys[0].shape
        self._heads, self._kv_heads, self._prefix = heads, kv_heads, prefix
        self._scales, self._eps = binary_scales(scales, len(keys), dim), eps
        self._padded = triton.next_power_of_2(heads // kv_heads)
        self._caches = cache_boxes(keys, values)
        self._constants = PrefixConstants(
            heads=heads,
            kv_heads=kv_heads,
            padded=self._padded,
            block_size=block_size,
            queries=_QUERIES,
            keys=_KEYS,
            stages=_STAGES,
            norm=norm,
            group_registers=_GROUP_REGISTERS,
            fetch_registers=_FETCH_REGISTERS,
        )
        dtype, int32, fp32 = keys[0].dtype, torch.int32, torch.float32
        self._kernel = _hopper_prefix_kernel.warmup(
            dtype, int32, int32, int32, int32, int32, fp32, fp32, dtype if norm else None,
            *self._caches[0], fp32, fp32, 1, self._scales[0], eps, 1, *self._constants,
            grid=(1,), num_warps=4, maxnreg=_REGISTERS, launch_pdl=True,
        )  # fmt: skip
        self._kernel[1, 1, 1]  # loads it

    def __call__(
        self,
        layer: int,
        qkv: Tensor,
        batch: DecodeBatch,
        heads: HeadInputs,
    ) -> None:
        """As ``prefix_attention`` over the caches of ``layer``; all but ``rows`` aligned to 16
        bytes."""
        rows, last_position, table = batch
        count = len(rows)
        tiles = triton.cdiv(count * self._padded, _QUERIES)
        parts = parts_for(count, self._heads, self._kv_heads)
        slot, lengths, partial, sums = self._prefix
        self._kernel[tiles, self._kv_heads, parts](
            qkv, rows, last_position, slot, lengths, table, heads.cos, heads.sin,
            heads.query_weight, *self._caches[layer], partial, sums, count, self._scales[layer],
            self._eps, table.stride(0), *self._constants,
        )  # fmt: skip
