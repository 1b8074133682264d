"""Parts of a row's attention on Hopper, added up: device functions of ``decode_stretches_hopper``.

A part is what some positions give to the query heads of a KV head: the weighted sum of their
values, the highest score (binary logarithm) and the total of the weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def add_parts(
    partial, sums, target, begin, end, second,
    SHARED: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Add up the parts that the programs ``begin`` to ``end`` have left; ``second``: whether the
    first of them holds its part in its second place."""
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    per_query: gl.constexpr = gl.SliceLayout(2, COMBINE)
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, per_query))
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, COMBINE)))
    top = gl.full([QUERIES], -1e30, gl.float32, gl.SliceLayout(0, per_query))
    total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, per_query))
    mixed = gl.zeros([QUERIES, DIM], gl.float32, gl.SliceLayout(0, COMBINE))
    for start in range(begin, end + 1, PARTS):
        program = start + gl.arange(0, PARTS, gl.SliceLayout(1, per_query))
        place = program * 2 + gl.where(program == begin, second, 0)
        there = (program <= end)[:, None] & (query < SHARED)[None, :]
        at = place[:, None] * SHARED + query[None, :]
        tops = gl.load(sums + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(sums + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        parts = gl.load(
            partial + at.expand_dims(2) * DIM + column[None, None, :],
            mask=there.expand_dims(2), other=0.0, cache_modifier=".cg",
        )  # fmt: skip
        highest = gl.maximum(top, gl.max(tops, 0))
        share = gl.exp2(tops - highest[None, :])
        decay = gl.exp2(top - highest)
        total = total * decay + gl.sum(totals * share, 0)
        decay = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(0, COMBINE)))
        mixed = mixed * decay[:, None] + gl.sum(parts * share.expand_dims(2), 0)
        top = highest
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COMBINE))
    total = gl.convert_layout(total, row)
    query = gl.arange(0, QUERIES, row)
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, COMBINE)))
    total = gl.where(query < SHARED, total, 1.0)
    gl.store(
        target + query[:, None] * DIM + column[None, :],
        (mixed / total[:, None]).to(target.dtype.element_ty), mask=(query < SHARED)[:, None],
    )  # fmt: skip


@gluon.jit
def with_prefix(
    partial, sums, count, first, top, total, low, high,
    SHARED: gl.constexpr, HALF: gl.constexpr, PARTS: gl.constexpr, COMBINE: gl.constexpr,
    mma: gl.constexpr,
):  # fmt: skip
    """Add the ``count`` parts of the shared prefix, from ``first`` on, to what the first warp has.

    partial: [part, query, column]; read once, by nobody else.
    """
    WARPS: gl.constexpr = gl.num_warps()
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    per_query: gl.constexpr = gl.SliceLayout(2, COMBINE)
    mixed_row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COMBINE))
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, per_query))
    column = gl.arange(0, HALF, gl.SliceLayout(0, gl.SliceLayout(1, COMBINE)))
    its_top = gl.full([QUERIES], -1e30, gl.float32, gl.SliceLayout(0, per_query))
    its_total = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, per_query))
    its_low = gl.zeros([QUERIES, HALF], gl.float32, gl.SliceLayout(0, COMBINE))
    its_high = gl.zeros([QUERIES, HALF], gl.float32, gl.SliceLayout(0, COMBINE))
    for start in range(0, count, PARTS):
        part = start + gl.arange(0, PARTS, gl.SliceLayout(1, per_query))
        there = (part < count)[:, None] & (query < SHARED)[None, :]
        at = (first + part)[:, None] * SHARED + query[None, :]
        tops = gl.load(sums + 2 * at, mask=there, other=float("-inf"), cache_modifier=".cg")
        totals = gl.load(sums + 2 * at + 1, mask=there, other=0.0, cache_modifier=".cg")
        place = partial + at.expand_dims(2) * (2 * HALF) + column[None, None, :]
        inside = there.expand_dims(2)
        lows = gl.load(place, mask=inside, other=0.0, cache_modifier=".cg")
        highs = gl.load(place + HALF, mask=inside, other=0.0, cache_modifier=".cg")
        highest = gl.maximum(its_top, gl.max(tops, 0))
        share = gl.exp2(tops - highest[None, :])
        decay = gl.exp2(its_top - highest)
        its_total = its_total * decay + gl.sum(totals * share, 0)
        decay = gl.convert_layout(decay, mixed_row)[:, None]
        share = share.expand_dims(2)
        its_low = its_low * decay + gl.sum(lows * share, 0)
        its_high = its_high * decay + gl.sum(highs * share, 0)
        its_top = highest
    query_axis: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, mma))
    of_one: gl.constexpr = gl.SliceLayout(0, mma)
    here = (gl.arange(0, WARPS, gl.SliceLayout(1, gl.SliceLayout(2, mma))) == 0)[:, None]
    # Queries past the last may be anything: they repeat the others.
    LONG: gl.constexpr = [16 // QUERIES, QUERIES, HALF]
    its_top = _repeated(its_top, LONG[:2], per_query)
    its_total = _repeated(its_total, LONG[:2], per_query)
    its_top = gl.convert_layout(its_top, query_axis)[None, :]
    its_total = gl.convert_layout(its_total, query_axis)[None, :]
    its_low = gl.convert_layout(_repeated(its_low, LONG, COMBINE), of_one).expand_dims(0)
    its_high = gl.convert_layout(_repeated(its_high, LONG, COMBINE), of_one).expand_dims(0)
    highest = gl.where(here, gl.maximum(top, its_top), top)
    decay = gl.exp2(top - highest)
    share = gl.where(here, gl.exp2(its_top - highest), 0.0)
    total = total * decay + its_total * share
    low = low * decay[:, :, None] + its_low * share[:, :, None]
    high = high * decay[:, :, None] + its_high * share[:, :, None]
    return highest, total, low, high


@gluon.jit
def _repeated(x, LONG: gl.constexpr, layout: gl.constexpr):
    """``x`` as often as ``LONG`` says first, one behind the other along its first axis."""
    x, _ = gl.broadcast(x.expand_dims(0), gl.zeros(LONG, gl.float32, layout))
    return x.reshape([LONG[0] * LONG[1]] + LONG[2:])  # noqa: RUF005 - Gluon has no other
