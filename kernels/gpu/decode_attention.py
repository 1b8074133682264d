"""Attention of decode rows over the paged KV cache, split over the context.

One program computes, for one row and one KV head, the query heads that share it over a split of
the context, with the online softmax of Milakov and Gimelshein (2018). The splits of a row are
combined by whichever program ends last (Flash-Decoding, Dao et al. 2023, without a second
launch); of many short ones groups are combined before, each by its last program. Where rows share a
prefix (``shared_prefix``), the first split begins behind it and takes in what is known of it. The
norm and the rotation of queries and key, and the write of the new K and V into the cache, happen
here too: the program of the first split has the new key and value in registers, the others read
only what earlier steps wrote. So nothing stands between the QKV product and the output product but
this kernel. Reference: ``penstock.kernels.attention``.

The grid depends on the number of rows alone, never on lengths: a captured graph stays valid. Each
byte of the cache is read once; the floor is that over the memory's bandwidth.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    DecodeBatch,
    HeadInputs,
    LayerCache,
    ListedBlocks,
    Scores,
    padded_half,
)
from penstock.kernels.gpu.decode_shapes import (
    CODES_SPLITS,
    shape_for,
    splits_for,
)
from penstock.kernels.gpu.decode_tile import (
    attended,
    attended_codes,
    listed_positions,
    query_operands,
    repeated,
    store_combined,
    store_group,
    tiles_each,
    with_lifted,
    with_prefix,
    write_codes,
)
from penstock.kernels.gpu.decode_workspace import DecodeWorkspace
from penstock.kernels.gpu.device_functions import (
    LOWEST,
    capped,
    count_below,
    first_seen,
    rotated_head,
    rotated_heads,
    with_sink,
    within,
)
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.shared_prefix import SharedPrefix, parts_for

_COMBINED = 8
"""Splits that are combined at once."""
_NUMBERS_EACH = 4096
"""Of a warp."""


# One compiled kernel serves every list of blocks of as many bits.
@triton.jit(do_not_specialize=["listed_stride", "most_listed"])
def _decode_kernel(
    qkv, rows, last_position, table, cos, sin, query_weight, key_weight, key_cache, value_cache,
    key_scales, value_scales, out, partial, partial_sums, arrived, prefix_lengths, prefix_partial,
    prefix_sums, sinks, listed, listed_stride, most_listed, scale, eps, table_stride,
    HEADS: tl.constexpr, KV_HEADS: tl.constexpr, SHARED: tl.constexpr, FEW: tl.constexpr,
    QUERIES: tl.constexpr, HALF: tl.constexpr, PADDED_HALF: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    TILE: tl.constexpr, MOST_SPLITS: tl.constexpr, COMBINED: tl.constexpr, GROUP: tl.constexpr,
    PREFIX_PARTS: tl.constexpr, NORM: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
    CAP: tl.constexpr, LISTED_BITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0)
    kv_head = tl.program_id(1)
    split = tl.program_id(2)
    splits = tl.num_programs(2)
    dim: tl.constexpr = 2 * HALF
    padded: tl.constexpr = 2 * PADDED_HALF
    times: tl.constexpr = QUERIES // FEW
    query = tl.arange(0, QUERIES) // times
    known = (tl.arange(0, QUERIES) % times == 0) & (query < SHARED)
    column = tl.arange(0, padded)
    half = tl.arange(0, PADDED_HALF)
    shared = within(known[:, None], column[None, :], dim, padded)
    target = out + (row.to(tl.int64) * HEADS + kv_head * SHARED) * dim
    target = target + query[:, None] * dim + column[None, :]
    slot = tl.load(rows + row)
    if slot < 0:
        return
    cached = tl.load(last_position + slot)
    skipped = 0  # positions that the shared prefix covers, or that the row does not see
    if WINDOW or CHUNK:
        skipped = first_seen(cached, WINDOW, CHUNK)
    if PREFIX_PARTS:
        skipped = tl.load(prefix_lengths + slot)
    tiles = tl.cdiv(cached - skipped, TILE)
    if LISTED_BITS:
        # Of the blocks that are seen besides those that begin ahead of the window or chunk.
        listed += slot.to(tl.int64) * listed_stride
        bound = tl.cdiv(skipped, BLOCK_SIZE)
        ahead = count_below(listed, most_listed, bound, LISTED_BITS) * BLOCK_SIZE
        listed_tiles = tl.cdiv(ahead, TILE)
        tiles += listed_tiles
    each = tiles_each(tiles, splits, TILE, key_scales is not None)
    active = tl.maximum(tl.cdiv(tiles, each), 1)
    if split >= active:
        return
    dtype = qkv.dtype.element_ty
    source = qkv + row.to(tl.int64) * (HEADS + 2 * KV_HEADS) * dim
    first, second = rotated_heads(
        source + kv_head * SHARED * dim, SHARED, cos, sin, query_weight, cached, eps,
        FEW, HALF, PADDED_HALF, NORM,
    )  # fmt: skip
    first = first.to(dtype)
    second = second.to(dtype)
    entries = table + slot.to(tl.int64) * table_stride

    if split == 0:
        new_first, new_second = rotated_head(
            source + (HEADS + kv_head) * dim, cos, sin, key_weight, cached, eps,
            HALF, PADDED_HALF, NORM,
        )  # fmt: skip
        new_first = new_first.to(dtype)
        new_second = new_second.to(dtype)
        block = tl.load(entries + cached // BLOCK_SIZE).to(tl.int64)
        page, offset = block * KV_HEADS + kv_head, cached % BLOCK_SIZE
        place = (page * BLOCK_SIZE + offset) * dim
        value = source + (HEADS + KV_HEADS + kv_head) * dim + column
        if key_scales is not None:
            new_value = tl.load(value, mask=column < dim, other=0.0)
            new_first, new_second, new_value = write_codes(
                new_first, new_second, new_value, key_cache, value_cache, key_scales, value_scales,
                page, offset, HALF, PADDED_HALF, BLOCK_SIZE,
            )  # fmt: skip
        elif HALF == PADDED_HALF:
            new_value = tl.load(value)
            tl.store(key_cache + place + half, new_first)
            tl.store(key_cache + place + HALF + half, new_second)
            tl.store(value_cache + place + column, new_value)
        else:
            new_value = tl.load(value, mask=column < dim, other=0.0)
            tl.store(key_cache + place + half, new_first, mask=half < HALF)
            tl.store(key_cache + place + HALF + half, new_second, mask=half < HALF)
            tl.store(value_cache + place + column, new_value, mask=column < dim)
        score = tl.sum(first.to(tl.float32) * new_first.to(tl.float32)[None, :], 1)
        score += tl.sum(second.to(tl.float32) * new_second.to(tl.float32)[None, :], 1)
        row_max = repeated(capped(score, scale, CAP), FEW, times)
        row_sum = tl.full([QUERIES], 1.0, tl.float32)
        accumulator = tl.zeros([QUERIES, padded], tl.float32) + new_value.to(tl.float32)[None, :]
        if key_scales is not None:
            row_max, row_sum, accumulator = with_lifted(row_max, accumulator, new_value)
        if sinks is not None:
            sink = tl.load(sinks + kv_head * SHARED + query, mask=query < SHARED, other=0.0)
            row_max, row_sum, accumulator = with_sink(sink, row_max, row_sum, accumulator)
        if PREFIX_PARTS:
            row_max, row_sum, accumulator = with_prefix(
                row_max, row_sum, accumulator, prefix_partial, prefix_sums,
                row * KV_HEADS + kv_head, query, column, skipped > 0,
                SHARED, dim, padded, PREFIX_PARTS,
            )  # fmt: skip
    else:
        row_max = tl.full([QUERIES], LOWEST if LISTED_BITS else float("-inf"), tl.float32)
        row_sum = tl.zeros([QUERIES], tl.float32)
        accumulator = tl.zeros([QUERIES, padded], tl.float32)

    if key_scales is not None:
        first, second, unit = query_operands(first, second, FEW, times, PADDED_HALF)
        even, odd = tl.split(tl.reshape(accumulator, [QUERIES, PADDED_HALF, 2]))
        even, odd = tl.trans(even), tl.trans(odd)
    if LISTED_BITS:
        tile = split * each
        for start in range(tile * TILE, tl.minimum(tile + each, listed_tiles) * TILE, TILE):
            position, inside = listed_positions(listed, start, ahead, skipped, TILE, BLOCK_SIZE)
            if key_scales is not None:
                row_max, row_sum, even, odd = attended_codes(
                    first, second, unit, position, inside, row_max, row_sum, even, odd, entries,
                    key_cache, value_cache, key_scales, value_scales, kv_head, scale,
                    KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, CAP,
                )  # fmt: skip
            else:
                row_max, row_sum, accumulator = attended(
                    first, second, position, inside, row_max, row_sum, accumulator, entries,
                    key_cache, value_cache, kv_head, scale,
                    KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, CAP,
                )  # fmt: skip
        begin = skipped + tl.maximum(tile - listed_tiles, 0) * TILE
        end = tl.minimum(skipped + tl.maximum(tile + each - listed_tiles, 0) * TILE, cached)
    else:
        begin = skipped + split * each * TILE
        end = tl.minimum(begin + each * TILE, cached)
    for start in range(begin, end, TILE):
        position = start + tl.arange(0, TILE)
        if key_scales is not None:
            row_max, row_sum, even, odd = attended_codes(
                first, second, unit, position, position < end, row_max, row_sum, even, odd, entries,
                key_cache, value_cache, key_scales, value_scales, kv_head, scale,
                KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, CAP,
            )  # fmt: skip
        else:
            row_max, row_sum, accumulator = attended(
                first, second, position, position < end, row_max, row_sum, accumulator, entries,
                key_cache, value_cache, kv_head, scale,
                KV_HEADS, HALF, PADDED_HALF, BLOCK_SIZE, CAP,
            )  # fmt: skip
    if key_scales is not None:
        accumulator = tl.join(tl.trans(even), tl.trans(odd))
        accumulator = tl.reshape(accumulator, [QUERIES, padded])

    if active == 1:
        tl.store(target, (accumulator / row_sum[:, None]).to(out.dtype.element_ty), mask=shared)
        return

    # [row, kv head, split, query]: of this program
    pair = (row.to(tl.int64) * KV_HEADS + kv_head) * splits
    at = (pair + split) * SHARED + query
    tl.store(partial + at[:, None] * dim + column[None, :], accumulator, mask=shared)
    tl.store(partial_sums + 2 * at, row_max, mask=known)
    tl.store(partial_sums + 2 * at + 1, row_sum, mask=known)
    tl.debug_barrier()
    counter = arrived + row * KV_HEADS + kv_head
    arrivals, apart = active, active * 0 + 1
    if GROUP:
        complete = active > 0
        if active > MOST_SPLITS:
            # The last program of a group leaves its part where that of the first was.
            arrivals, apart = tl.cdiv(active, GROUP), apart * GROUP
            group = split // GROUP
            before = (row * KV_HEADS + kv_head) * (splits // GROUP) + group
            of_group = arrived + tl.num_programs(0) * KV_HEADS + before
            members = tl.minimum(active - group * GROUP, GROUP)
            complete = tl.atomic_add(of_group, 1, sem="acq_rel") == members - 1
            if complete:
                tl.store(of_group, 0)
                store_group(
                    partial, partial_sums, pair + group * GROUP, members,
                    SHARED, FEW, dim, padded, GROUP, COMBINED,
                )  # fmt: skip
                tl.debug_barrier()
        if not complete:
            return
    ticket = tl.atomic_add(counter, 1, sem="acq_rel")
    if ticket == arrivals - 1:
        tl.store(counter, 0)
        if key_scales is not None:
            store_combined(
                out + (row.to(tl.int64) * HEADS + kv_head * SHARED) * dim, partial, partial_sums,
                pair, arrivals, apart, SHARED, FEW, dim, padded, MOST_SPLITS, COMBINED,
            )  # fmt: skip
        else:
            every = tl.arange(0, MOST_SPLITS)
            for query_head in range(SHARED):
                of = (pair + every) * SHARED + query_head
                maxima = tl.load(
                    partial_sums + 2 * of, mask=every < active, other=float("-inf"),
                    cache_modifier=".cg",
                )  # fmt: skip
                sums = tl.load(
                    partial_sums + 2 * of + 1, mask=every < active, other=0.0, cache_modifier=".cg"
                )
                highest = tl.max(maxima, 0)
                total = tl.sum(sums * tl.exp2(maxima - highest), 0)
                whole = tl.zeros([padded], tl.float32)
                for first_part in range(0, active, COMBINED):
                    part = first_part + tl.arange(0, COMBINED)
                    valid = part < active
                    some = (pair + part) * SHARED + query_head
                    some_maxima = tl.load(
                        partial_sums + 2 * some, mask=valid, other=float("-inf"),
                        cache_modifier=".cg",
                    )  # fmt: skip
                    parts = tl.load(
                        partial + some[:, None] * dim + column[None, :],
                        mask=within(valid[:, None], column[None, :], dim, padded), other=0.0,
                        cache_modifier=".cg",
                    )  # fmt: skip
                    whole += tl.sum(parts * tl.exp2(some_maxima - highest)[:, None], 0)
                head = row.to(tl.int64) * HEADS + kv_head * SHARED + query_head
                result = (whole / total).to(out.dtype.element_ty)
                if HALF == PADDED_HALF:
                    tl.store(out + head * dim + column, result)
                else:
                    tl.store(out + head * dim + column, result, mask=column < dim)


class DecodeConstants(NamedTuple):
    """The kernel's constants, in its order."""

    heads: int
    kv_heads: int
    shared: int
    """Query heads for a KV head."""
    few: int
    """Those, filled up to a power of two."""
    queries: int
    """Those, with zeros or each of them repeated, filled up to what a product takes."""
    half: int
    padded_half: int
    block_size: int
    tile: int
    most_splits: int
    """Where there are groups, of those; fewer splits are combined at once."""
    combined: int
    group: int
    """Splits whose parts are combined first; 0: there are no groups."""
    prefix_parts: int
    """0: there is no prefix."""
    norm: bool
    window: int
    chunk: int
    cap: float
    """Soft cap of scores, times log2(e); 0: none."""
    listed_bits: int
    """0: no blocks are listed."""
    early: bool


def _combined(shared: int, dim: int, warps: int) -> int:
    """Splits that are combined at once of all heads: as many numbers as registers hold."""
    numbers = triton.next_power_of_2(shared) * 2 * padded_half(dim)
    return int(max(1, min(_COMBINED, _NUMBERS_EACH * warps // numbers)))


def decode_attention(
    qkv: Tensor,
    batch: DecodeBatch,
    heads: HeadInputs,
    cache: LayerCache,
    out: Tensor,
    workspace: DecodeWorkspace,
    eps: float,
    prefix: SharedPrefix | None = None,
    scores: Scores | None = None,
    sinks: Tensor | None = None,
    listed: ListedBlocks = NOTHING_LISTED,
) -> None:
    """One token of each of N sequences.

    qkv: [N, Hq + 2 Hkv, D], not yet normed or rotated; the new positions are written into the
    cache; out: [N, Hq, D], rows of padding are left alone; eps: of the norms of heads; prefix: what
    ``prefix_attention`` was called with just before, for the same rows; scores: by default scaled
    by 1 / sqrt(D); with a window or chunks there is no prefix; sinks: [Hq], one score more for each
    head, which stands for no value; listed: blocks that rows see besides. All contiguous, D even,
    the block size a power of two.
    """
    count, all_heads, dim = qkv.shape
    _, kv_heads, block_size, _ = cache.keys.shape
    num_heads = all_heads - 2 * kv_heads
    shared = num_heads // kv_heads
    made = scores or Scores(dim**-0.5)
    if made.local and prefix:
        raise ValueError("rows with a window or chunks share no prefix")
    scale, cap = made.in_binary
    codes = cache.key_scales is not None and qkv.element_size() == 2
    shape = shape_for(dim, count * kv_heads, codes=codes, shared=shared)
    quantized = cache.key_scales is not None
    most_splits = max(shape.splits, CODES_SPLITS) if quantized else shape.splits
    splits = splits_for(count, kv_heads, most_splits)
    group = shape.group if splits > shape.group else 0
    few = triton.next_power_of_2(shared)
    queries = max(16, few) if cache.key_scales is None else max(8, few)
    constants = DecodeConstants(
        heads=num_heads,
        kv_heads=kv_heads,
        shared=shared,
        few=queries if cache.key_scales is None else few,
        queries=queries,
        half=dim // 2,
        padded_half=padded_half(dim),
        block_size=block_size,
        tile=shape.tile,
        most_splits=max(group, most_splits // group) if group else most_splits,
        combined=_COMBINED if cache.key_scales is None else _combined(shared, dim, shape.warps),
        group=group,
        prefix_parts=parts_for(count, num_heads, kv_heads) if prefix else 0,
        norm=heads.query_weight is not None,
        window=made.window,
        chunk=made.chunk,
        cap=cap,
        listed_bits=listed.bits if made.local else 0,
        early=EARLY,
    )
    of_prefix = (prefix.lengths, prefix.partial, prefix.sums) if prefix else (None, None, None)
    _decode_kernel[(count, kv_heads, splits)](
        qkv, *batch, *heads, *cache, out, *workspace, *of_prefix, sinks, *listed, scale,
        eps, batch.table.stride(0), *constants,
        num_warps=shape.warps, num_stages=shape.stages, launch_pdl=EARLY,
    )  # fmt: skip
