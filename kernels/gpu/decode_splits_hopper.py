"""Attention of decode rows on Hopper: the kernel that ``decode_attention_hopper`` starts.

Every program has the same share of a step's work, a split of tiles of cached positions
(``decode_plan``: stream-K, Osama et al. 2023; "Lean attention", Sanovar et al. 2024). It streams
its tiles through shared memory by the tensor memory accelerator, also past the end of a row, so
that loads are under way at all times. Each of its warps has a share of a tile's positions and an
online softmax to itself; they meet at the end of a row or split. A (row, KV head) that lies in one
split is written at once; the parts of others are merged, in the order of positions, by the program
that ends last: the same bits in every run. Reference: ``penstock.kernels.attention``.

Where rows share a prefix, their tiles begin behind it, which need not be at a multiple of a tile. A
program leaves each row that it has completed as a part, and adds those that ``shared_prefix`` has
left when it has done all its tiles: until then it need not wait for that kernel.

A program reads the plan, the block tables and its first tiles of the cache before it waits for the
kernel ahead of it; behind a shared prefix QKV, too, and it writes K and V, because the kernel that
attends to the prefix lets this one start only when the QKV product is over. That is right because

- rows, positions, lengths of a shared prefix and block tables change between steps only, and the
  plan, the first kernel of a step, is launched without early start: all that wrote them is over,
  and so is what wrote K and V in earlier steps;
- within a step nobody writes a cached position of a decoding slot: decode writes the position
  behind them, chunks write other slots';
- the kernel behind the plan lets its successor start only after it has itself waited
  (``slots.embed``), so that the plan is written when a program reads it;
- each program waits for the kernel ahead before it ends, also one that has nothing to do, so that
  behind this kernel all that came before it is over, too.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from penstock.kernels.gpu.decode_parts_hopper import merge_parts, merge_prefix, store_part
from penstock.kernels.gpu.device_functions_hopper import rotated_halves, softmax_step

_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # triton 3.6


@gluon.jit
def _owner(item, each, longer):
    """The program whose split holds an item."""
    high = longer * (each + 1)
    late = longer + (item - high) // gl.maximum(each, 1)
    return gl.where(item < high, item // (each + 1), late)


@gluon.jit
def _slot_of(rows, last_position, shared_lengths, row, valid, KEYS: gl.constexpr):
    """A row's slot, positions of a shared prefix, cached positions and tiles."""
    slot = gl.load(rows + row, mask=valid, other=-1)
    cached = gl.load(last_position + slot, mask=slot >= 0, other=0)
    skipped = _skipped(shared_lengths, slot, slot >= 0)
    return slot, skipped, cached, _tiles(cached - skipped, KEYS)


@gluon.jit
def _skipped(shared_lengths, slot, valid):
    """Positions of a slot that a shared prefix covers."""
    skipped = slot * 0
    if shared_lengths is not None:
        skipped = gl.load(shared_lengths + slot, mask=valid, other=0)
    return skipped


@gluon.jit
def _tiles(length, KEYS: gl.constexpr):
    return gl.maximum((length + KEYS - 1) // KEYS, 1)


@gluon.jit
def _fetch(
    key_box, value_box, keys, values, ready, stage, table, table_stride, slot, skipped, cached,
    kv_head, tile,
    KV_HEADS: gl.constexpr, BLOCK_SIZE: gl.constexpr, KEYS: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Start to bring one tile of keys and values; past a row's last block that one again."""
    BOX: gl.constexpr = min(BLOCK_SIZE, KEYS)
    entries = table + slot.to(gl.int64) * table_stride
    last = gl.maximum(cached - 1, 0) // BLOCK_SIZE
    mbarrier.expect(ready.index(stage), KEYS * HALF * 2 * 2 * 2)
    for part in gl.static_range(KEYS // BOX):
        position = skipped + tile * KEYS + part * BOX
        block = gl.load(entries + gl.minimum(position // BLOCK_SIZE, last))
        line = (block * KV_HEADS + kv_head) * BLOCK_SIZE
        if BLOCK_SIZE > BOX:
            line += position % BLOCK_SIZE
        for half in gl.static_range(2):
            target = keys.index(stage * 2 + half).slice(part * BOX, BOX)
            tma.async_copy_global_to_shared(
                key_box, [line, half * HALF], ready.index(stage), target
            )
        for half in gl.static_range(2):
            target = values.index(stage * 2 + half).slice(part * BOX, BOX)
            tma.async_copy_global_to_shared(
                value_box, [line, half * HALF], ready.index(stage), target
            )


@gluon.jit
def _advance(
    rows, last_position, shared_lengths, row, head, tile, slot, skipped, cached, tiles, more,
    KV_HEADS: gl.constexpr, KEYS: gl.constexpr,
):  # fmt: skip
    """The item behind an item."""
    tile += 1
    if tile == tiles:
        tile = tile * 0
        head += 1
        if head == KV_HEADS:
            head = head * 0
            row += 1
            slot, skipped, cached, tiles = _slot_of(
                rows, last_position, shared_lengths, row, more, KEYS
            )
    return row, head, tile, slot, skipped, cached, tiles


@gluon.jit
def _attend_tile(
    keys, values, stage, start, cached, first, second, row_max, row_sum, low, high, scale,
    KEYS: gl.constexpr, HALF: gl.constexpr, mma: gl.constexpr,
):  # fmt: skip
    """One step of the online softmax: the tile of positions ``start`` …, a share for each warp."""
    WARPS: gl.constexpr = gl.num_warps()
    EACH: gl.constexpr = KEYS // WARPS
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    right: gl.constexpr = gl.DotOperandLayout(1, mma, 2)
    key = keys.index(stage * 2).reshape([WARPS, EACH, HALF]).permute((0, 2, 1)).load(right)
    score = mma_v2(first, key, gl.zeros([WARPS, 16, EACH], gl.float32, mma))
    key = keys.index(stage * 2 + 1).reshape([WARPS, EACH, HALF]).permute((0, 2, 1)).load(right)
    score = mma_v2(second, key, score) * scale
    value_low = values.index(stage * 2).reshape([WARPS, EACH, HALF]).load(right)
    value_high = values.index(stage * 2 + 1).reshape([WARPS, EACH, HALF]).load(right)
    if start + KEYS > cached:
        # What lies past the row may be anything, NaN included.
        per_column: gl.constexpr = gl.SliceLayout(1, mma)
        position = start + gl.arange(0, EACH, gl.SliceLayout(0, per_column))[None, :]
        position = position + gl.expand_dims(
            gl.arange(0, WARPS, gl.SliceLayout(1, per_column)) * EACH, 1
        )
        score = gl.where((position < cached).expand_dims(1), score, float("-inf"))
        per_value: gl.constexpr = gl.SliceLayout(2, right)
        position = start + gl.arange(0, EACH, gl.SliceLayout(0, per_value))[None, :]
        position = position + gl.expand_dims(
            gl.arange(0, WARPS, gl.SliceLayout(1, per_value)) * EACH, 1
        )
        inside = (position < cached).expand_dims(2)
        value_low = gl.where(inside, value_low, 0.0)
        value_high = gl.where(inside, value_high, 0.0)
    row_max, row_sum, decay, weight = softmax_step(score, row_max, row_sum, 1.0, 2)
    weight = gl.convert_layout(weight.to(first.dtype), left)
    low = mma_v2(weight, value_low, low * decay[:, :, None])
    high = mma_v2(weight, value_high, high * decay[:, :, None])
    return row_max, row_sum, low, high


# One compiled kernel serves every call: nothing depends on these integers' values.
@gluon.jit(do_not_specialize=["prefix_parts", "table_stride"])
def hopper_decode_kernel(
    qkv, plan, rows, last_position, table, key_box, value_box, key_cache, value_cache, cos, sin,
    query_weight, key_weight, out, partial, sums, arrived, shared_lengths, prefix_partial,
    prefix_sums, prefix_parts, suffix_parts, suffix_sums, scale, eps, table_stride,
    HEADS: gl.constexpr, KV_HEADS: gl.constexpr, HALF: gl.constexpr, BLOCK_SIZE: gl.constexpr,
    KEYS: gl.constexpr, STAGES: gl.constexpr, PARTS: gl.constexpr, COMBINE: gl.constexpr,
    NORM: gl.constexpr,
):  # fmt: skip
    tl.extra.cuda.gdc_launch_dependents()
    WARPS: gl.constexpr = gl.num_warps()
    SHARED: gl.constexpr = HEADS // KV_HEADS
    DIM: gl.constexpr = 2 * HALF
    dtype: gl.constexpr = qkv.dtype.element_ty
    program = gl.program_id(0)
    record = plan + program * 8
    row = gl.load(record, cache_modifier=".cg")
    head = gl.load(record + 1, cache_modifier=".cg")
    tile = gl.load(record + 2, cache_modifier=".cg")
    count = gl.load(record + 3, cache_modifier=".cg")
    each = gl.load(record + 4, cache_modifier=".cg")
    longer = gl.load(record + 5, cache_modifier=".cg")
    slot = gl.load(record + 6, cache_modifier=".cg")
    cached = gl.load(record + 7, cache_modifier=".cg")
    if count == 0:
        # Not before the kernel ahead is over: the next one waits for this one alone.
        tl.extra.cuda.gdc_wait()
        return
    skipped = _skipped(shared_lengths, slot, slot >= 0)
    tiles = _tiles(cached - skipped, KEYS)
    first_item = program * each + gl.minimum(program, longer)

    swizzled: gl.constexpr = gl.NVMMASharedLayout(HALF * 2, 16, 2)
    keys = gl.allocate_shared_memory(dtype, [STAGES * 2, KEYS, HALF], swizzled)
    values = gl.allocate_shared_memory(dtype, [STAGES * 2, KEYS, HALF], swizzled)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for early in gl.static_range(STAGES):
        mbarrier.init(ready.index(early), count=1)
    fence_async_shared()
    _barrier()

    # Where the copies are: always STAGES tiles ahead of the products.
    next_row, next_head, next_tile = row, head, tile
    next_slot, next_skipped, next_cached, next_tiles = slot, skipped, cached, tiles
    for early in gl.static_range(STAGES):
        if early < count:
            _fetch(
                key_box, value_box, keys, values, ready, early, table, table_stride, next_slot,
                next_skipped, next_cached, next_head, next_tile, KV_HEADS, BLOCK_SIZE, KEYS, HALF,
            )  # fmt: skip
            (
                next_row, next_head, next_tile, next_slot, next_skipped, next_cached, next_tiles,
            ) = _advance(
                rows, last_position, shared_lengths, next_row, next_head, next_tile, next_slot,
                next_skipped, next_cached, next_tiles, early + 1 < count, KV_HEADS, KEYS,
            )  # fmt: skip
    if shared_lengths is None:
        tl.extra.cuda.gdc_wait()

    mma: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    left: gl.constexpr = gl.DotOperandLayout(0, mma, 2)
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [256 // HALF, HALF // 8], [WARPS, 1], [1, 0])
    per_query: gl.constexpr = gl.SliceLayout(2, mma)
    query_axis: gl.constexpr = gl.SliceLayout(0, per_query)
    of_one: gl.constexpr = gl.SliceLayout(0, mma)
    column_axis: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(1, mma))
    query = gl.arange(0, 16, gl.SliceLayout(1, wide))
    half = gl.arange(0, HALF, gl.SliceLayout(0, wide))
    column = gl.arange(0, HALF, column_axis)
    out_query = gl.arange(0, 16, gl.SliceLayout(1, of_one))
    place = out_query[:, None] * DIM + gl.arange(0, HALF, gl.SliceLayout(0, of_one))[None, :]
    wanted = (out_query < SHARED)[:, None]

    # Behind a prefix: pairs that this program has completed, and finishes at the end.
    completed_from = row * KV_HEADS + head
    completed_to = completed_from
    done = count * 0
    while done < count:
        pair = row * KV_HEADS + head
        stop = gl.minimum(tiles, tile + count - done)
        source = qkv + row.to(gl.int64) * (HEADS + 2 * KV_HEADS) * DIM
        # Queries; the new key and value, wanted with the first tile.
        angle = cached.to(gl.int64) * HALF + half
        c = gl.load(cos + angle)
        s = gl.load(sin + angle)
        block = gl.load(table + slot.to(gl.int64) * table_stride + cached // BLOCK_SIZE)
        begin = source + head * SHARED * DIM + query[:, None] * DIM + half[None, :]
        valid = (query < SHARED)[:, None]
        first = gl.load(begin, mask=valid, other=0.0).to(gl.float32)
        second = gl.load(begin + HALF, mask=valid, other=0.0).to(gl.float32)
        new_key = source + (HEADS + head) * DIM + half
        new_first = gl.load(new_key).to(gl.float32)
        new_second = gl.load(new_key + HALF).to(gl.float32)
        new_value = source + (HEADS + KV_HEADS + head) * DIM + column
        low_value = gl.load(new_value)
        high_value = gl.load(new_value + HALF)
        first, second = rotated_halves(
            first, second, query_weight, half, c[None, :], s[None, :], eps, HALF, NORM, 1
        )
        first = first.to(dtype)
        second = second.to(dtype)

        row_max = gl.full([WARPS, 16], -1e30, gl.float32, per_query)
        row_sum = gl.zeros([WARPS, 16], gl.float32, per_query)
        low = gl.zeros([WARPS, 16, HALF], gl.float32, mma)
        high = gl.zeros([WARPS, 16, HALF], gl.float32, mma)
        if tile == 0:
            new_first, new_second = rotated_halves(
                new_first, new_second, key_weight, half, c, s, eps, HALF, NORM, 0
            )
            key_first = new_first.to(dtype)
            key_second = new_second.to(dtype)
            line = (block.to(gl.int64) * KV_HEADS + head) * BLOCK_SIZE + cached % BLOCK_SIZE
            gl.store(key_cache + line * DIM + half, key_first)
            gl.store(key_cache + line * DIM + HALF + half, key_second)
            gl.store(value_cache + line * DIM + column, low_value)
            gl.store(value_cache + line * DIM + HALF + column, high_value)
            product = first.to(gl.float32) * key_first.to(gl.float32)[None, :]
            product += second.to(gl.float32) * key_second.to(gl.float32)[None, :]
            new_score = gl.convert_layout(gl.sum(product, 1) * scale, query_axis)
            # It is the first warp's.
            here = (gl.arange(0, WARPS, gl.SliceLayout(1, per_query)) == 0)[:, None]
            row_max = gl.where(here, new_score[None, :], row_max)
            row_sum = gl.where(here, 1.0, row_sum)
            here = here.expand_dims(2)
            low = gl.where(here, low_value.to(gl.float32)[None, None, :], low)
            high = gl.where(here, high_value.to(gl.float32)[None, None, :], high)

        first = gl.convert_layout(first, gl.SliceLayout(0, left)).expand_dims(0)
        second = gl.convert_layout(second, gl.SliceLayout(0, left)).expand_dims(0)
        if WARPS > 1:
            first, _ = gl.broadcast(first, gl.zeros([WARPS, 16, HALF], dtype, left))
            second, _ = gl.broadcast(second, gl.zeros([WARPS, 16, HALF], dtype, left))
        for turn in range(tile, stop):
            at = done + turn - tile
            stage = at % STAGES
            mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
            row_max, row_sum, low, high = _attend_tile(
                keys, values, stage, skipped + turn * KEYS, cached, first, second, row_max, row_sum,
                low, high, scale, KEYS, HALF, mma,
            )  # fmt: skip
            if WARPS > 1:
                _barrier()
            if at + STAGES < count:
                _fetch(
                    key_box, value_box, keys, values, ready, stage, table, table_stride,
                    next_slot, next_skipped, next_cached, next_head, next_tile, KV_HEADS,
                    BLOCK_SIZE, KEYS, HALF,
                )  # fmt: skip
                (
                    next_row, next_head, next_tile, next_slot, next_skipped, next_cached,
                    next_tiles,
                ) = _advance(
                    rows, last_position, shared_lengths, next_row, next_head, next_tile, next_slot,
                    next_skipped, next_cached, next_tiles, at + STAGES + 1 < count, KV_HEADS, KEYS,
                )  # fmt: skip

        # The warps' parts become one.
        new_max = gl.max(row_max, 0)
        share = gl.exp2(row_max - new_max[None, :])
        whole = gl.sum(row_sum * share, 0)
        low_sum = gl.sum(low * share[:, :, None], 0)
        high_sum = gl.sum(high * share[:, :, None], 0)
        whole_row = stop - tile == tiles
        queries = gl.arange(0, 16, query_axis)
        if whole_row:
            if suffix_parts is not None:
                store_part(
                    low_sum, high_sum, new_max, whole, suffix_parts, suffix_sums, pair, place,
                    wanted, queries, SHARED, HALF,
                )  # fmt: skip
            else:
                divisor = gl.convert_layout(whole, gl.SliceLayout(1, of_one))[:, None]
                target = out + pair * (SHARED * DIM) + place
                gl.store(target, (low_sum / divisor).to(dtype), mask=wanted)
                gl.store(target + HALF, (high_sum / divisor).to(dtype), mask=wanted)
        else:
            start = first_item + done - tile
            mine = program * 2 + (done > 0).to(gl.int32)
            store_part(
                low_sum, high_sum, new_max, whole, partial, sums, mine, place, wanted, queries,
                SHARED, HALF,
            )  # fmt: skip
            begin_program = _owner(start, each, longer)
            end_program = _owner(start + tiles - 1, each, longer)
            _barrier()
            ticket = gl.atomic_add(arrived + pair, 1, sem="acq_rel")
            whole_row = ticket == end_program - begin_program
            if whole_row:
                gl.store(arrived + pair, 0)
                first_begin = begin_program * each + gl.minimum(begin_program, longer)
                merge_parts(
                    partial, sums, out, suffix_parts, suffix_sums, pair, begin_program, end_program,
                    (first_begin != start).to(gl.int32), SHARED, DIM, PARTS, COMBINE,
                )  # fmt: skip
            elif done == 0:
                completed_from = pair + 1
        if whole_row:
            completed_to = pair + 1

        done += stop - tile
        tile = tile * 0
        if stop == tiles:
            head += 1
            if head == KV_HEADS:
                head = head * 0
                row += 1
                slot, skipped, cached, tiles = _slot_of(
                    rows, last_position, shared_lengths, row, done < count, KEYS
                )

    if suffix_parts is not None:
        # Until here the kernel ahead, which attends to the prefix, may have been at work.
        tl.extra.cuda.gdc_wait()
        _barrier()
        merge_prefix(
            suffix_parts, suffix_sums, prefix_partial, prefix_sums, prefix_parts, rows,
            shared_lengths, completed_from, completed_to, out, KV_HEADS, SHARED, DIM, PARTS,
            COMBINE,
        )  # fmt: skip
