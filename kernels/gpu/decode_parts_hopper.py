"""Parts of a row's attention on Hopper, added up: device functions of ``decode_stretches_hopper``.

A part is what some positions give to the query heads of a KV head: the weighted sum of their
values, the highest score (binary logarithm) and the total of the weights.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _added(
    partial, sums, at, there, top, total, mixed, column,
    DIM: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Some parts, those at ``at`` [part, query] that are there, added to ``mixed``."""
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
    return highest, total, mixed


@gluon.jit
def _leave(
    top, total, mixed, out, own, own_sums, pair,
    SHARED: gl.constexpr, DIM: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Write what the queries of a pair, row and KV head, were given [query, column]: as a part to
    ``own``, or where that is ``None`` divided by the total to ``out``."""
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    of_sums: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COMBINE))
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COMBINE))
    query = gl.arange(0, QUERIES, row)
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, COMBINE)))
    place = (pair * SHARED + query[:, None]) * DIM + column[None, :]
    wanted = (query < SHARED)[:, None]
    if own is not None:
        gl.store(own + place, mixed, mask=wanted)
        query = gl.arange(0, QUERIES, of_sums)
        its_sums = own_sums + 2 * (pair * SHARED + query)
        gl.store(its_sums, top, mask=query < SHARED)
        gl.store(its_sums + 1, total, mask=query < SHARED)
    else:
        total = gl.where(query < SHARED, gl.convert_layout(total, row), 1.0)
        gl.store(out + place, (mixed / total[:, None]).to(out.dtype.element_ty), mask=wanted)


@gluon.jit
def add_parts(
    partial, sums, out, own, own_sums, pair, begin, end, second,
    SHARED: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Add up the parts of a pair that the programs ``begin`` to ``end`` have left, for ``_leave``;
    ``second``: whether the first of them holds its part in its second place."""
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
        top, total, mixed = _added(
            partial, sums, at, there, top, total, mixed, column, DIM, COMBINE
        )
    _leave(top, total, mixed, out, own, own_sums, pair, SHARED, DIM, COMBINE)


@gluon.jit
def finish_rows(
    own, own_sums, partial, sums, count, rows, shared_lengths, begin, end, out,
    KV_HEADS: gl.constexpr, SHARED: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """Add the ``count`` parts of the shared prefix to the own part of each pair from ``begin`` to
    before ``end``, where its slot shares it; results go to ``out`` [row, head, column]."""
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    per_query: gl.constexpr = gl.SliceLayout(2, COMBINE)
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, per_query))
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, COMBINE)))
    wanted = query < SHARED
    row = gl.arange(0, QUERIES, gl.SliceLayout(1, gl.SliceLayout(0, COMBINE)))[:, None]
    place = row * DIM + gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, COMBINE)))[None, :]
    for pair in range(begin, end):
        first = pair * SHARED
        its_sums = own_sums + 2 * (first + query)
        top = gl.load(its_sums, mask=wanted, other=-1e30, cache_modifier=".cg")
        total = gl.load(its_sums + 1, mask=wanted, other=0.0, cache_modifier=".cg")
        mixed = gl.load(
            own + first * DIM + place, mask=row < SHARED, other=0.0, cache_modifier=".cg"
        )
        passed = gl.load(shared_lengths + gl.load(rows + pair // KV_HEADS))
        for start in range(0, gl.where(passed > 0, count, 0), PARTS):
            part = start + gl.arange(0, PARTS, gl.SliceLayout(1, per_query))
            there = (part < count)[:, None] & wanted[None, :]
            at = (pair * count + part)[:, None] * SHARED + query[None, :]
            top, total, mixed = _added(
                partial, sums, at, there, top, total, mixed, column, DIM, COMBINE
            )
        _leave(top, total, mixed, out, None, None, pair, SHARED, DIM, COMBINE)


@gluon.jit
def store_part(
    low, high, top, total, parts, sums, index, place, wanted, query,
    SHARED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Write the part ``index``: halves of columns, at ``place`` in it."""
    place += index * (SHARED * 2 * HALF)
    gl.store(parts + place, low, mask=wanted)
    gl.store(parts + place + HALF, high, mask=wanted)
    gl.store(sums + (index * SHARED + query) * 2, top, mask=query < SHARED)
    gl.store(sums + (index * SHARED + query) * 2 + 1, total, mask=query < SHARED)
