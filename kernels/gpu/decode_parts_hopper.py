"""Parts of a row's attention on Hopper, merged: device functions of ``decode_splits_hopper``.

A part is what some positions give to the query heads of a KV head: the weighted sum of their
values, the highest score (binary logarithm) and the sum of the weights. Reference:
``penstock.kernels.attention``.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def _merged(
    partial, sums, at, valid, row_max, row_sum, accumulator, column,
    DIM: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Some parts, those at ``at`` [part, query] that are there, added to ``accumulator``."""
    part_maxima = gl.load(sums + 2 * at, mask=valid, other=float("-inf"), cache_modifier=".cg")
    part_sums = gl.load(sums + 2 * at + 1, mask=valid, other=0.0, cache_modifier=".cg")
    parts = gl.load(
        partial + at.expand_dims(2) * DIM + column[None, None, :],
        mask=valid.expand_dims(2), other=0.0, cache_modifier=".cg",
    )  # fmt: skip
    new_max = gl.maximum(row_max, gl.max(part_maxima, 0))
    share = gl.exp2(part_maxima - new_max[None, :])
    decay = gl.exp2(row_max - new_max)
    row_sum = row_sum * decay + gl.sum(part_sums * share, 0)
    decay = gl.convert_layout(decay, gl.SliceLayout(1, gl.SliceLayout(0, COMBINE)))
    accumulator = accumulator * decay[:, None] + gl.sum(parts * share.expand_dims(2), 0)
    return new_max, row_sum, accumulator


@gluon.jit
def _store_result(
    row_max, row_sum, accumulator, out, suffix, suffix_sums, pair,
    SHARED: gl.constexpr, DIM: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Write what the queries of a pair, row and KV head, were given [query, column]: as a part to
    ``suffix``, or where that is ``None`` divided by the total to ``out``."""
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    of_sums: gl.constexpr = gl.SliceLayout(0, gl.SliceLayout(2, COMBINE))
    row: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(0, COMBINE))
    query = gl.arange(0, QUERIES, row)
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(0, COMBINE)))
    place = (pair * SHARED + query[:, None]) * DIM + column[None, :]
    wanted = (query < SHARED)[:, None]
    if suffix is not None:
        gl.store(suffix + place, accumulator, mask=wanted)
        query = gl.arange(0, QUERIES, of_sums)
        pair_sums = suffix_sums + 2 * (pair * SHARED + query)
        gl.store(pair_sums, row_max, mask=query < SHARED)
        gl.store(pair_sums + 1, row_sum, mask=query < SHARED)
    else:
        row_sum = gl.where(query < SHARED, gl.convert_layout(row_sum, row), 1.0)
        gl.store(
            out + place, (accumulator / row_sum[:, None]).to(out.dtype.element_ty), mask=wanted
        )


@gluon.jit
def merge_parts(
    partial, sums, out, suffix, suffix_sums, pair, begin, end, second,
    SHARED: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr, COMBINE: gl.constexpr,
):  # fmt: skip
    """Merge the parts of a pair that the programs ``begin`` to ``end`` have left, and store the
    result; ``second``: whether the first of them holds its part in its second place."""
    QUERIES: gl.constexpr = 1 << (SHARED - 1).bit_length()
    per_query: gl.constexpr = gl.SliceLayout(2, COMBINE)
    query = gl.arange(0, QUERIES, gl.SliceLayout(0, per_query))
    column = gl.arange(0, DIM, gl.SliceLayout(0, gl.SliceLayout(1, COMBINE)))
    row_max = gl.full([QUERIES], -1e30, gl.float32, gl.SliceLayout(0, per_query))
    row_sum = gl.zeros([QUERIES], gl.float32, gl.SliceLayout(0, per_query))
    accumulator = gl.zeros([QUERIES, DIM], gl.float32, gl.SliceLayout(0, COMBINE))
    for start in range(begin, end + 1, PARTS):
        program = start + gl.arange(0, PARTS, gl.SliceLayout(1, per_query))
        place = program * 2 + gl.where(program == begin, second, 0)
        valid = (program <= end)[:, None] & (query < SHARED)[None, :]
        at = place[:, None] * SHARED + query[None, :]
        row_max, row_sum, accumulator = _merged(
            partial, sums, at, valid, row_max, row_sum, accumulator, column, DIM, COMBINE
        )
    _store_result(
        row_max, row_sum, accumulator, out, suffix, suffix_sums, pair, SHARED, DIM, COMBINE
    )


@gluon.jit
def merge_prefix(
    suffix, suffix_sums, partial, sums, count, rows, shared_lengths, begin, end, out,
    KV_HEADS: gl.constexpr, SHARED: gl.constexpr, DIM: gl.constexpr, PARTS: gl.constexpr,
    COMBINE: gl.constexpr,
):  # fmt: skip
    """Merge the ``count`` parts of the shared prefix with the suffix of each pair from ``begin`` to
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
        pair_sums = suffix_sums + 2 * (first + query)
        row_max = gl.load(pair_sums, mask=wanted, other=-1e30, cache_modifier=".cg")
        row_sum = gl.load(pair_sums + 1, mask=wanted, other=0.0, cache_modifier=".cg")
        accumulator = gl.load(
            suffix + first * DIM + place, mask=row < SHARED, other=0.0, cache_modifier=".cg"
        )
        skipped = gl.load(shared_lengths + gl.load(rows + pair // KV_HEADS))
        for start in range(0, gl.where(skipped > 0, count, 0), PARTS):
            part = start + gl.arange(0, PARTS, gl.SliceLayout(1, per_query))
            valid = (part < count)[:, None] & wanted[None, :]
            at = (pair * count + part)[:, None] * SHARED + query[None, :]
            row_max, row_sum, accumulator = _merged(
                partial, sums, at, valid, row_max, row_sum, accumulator, column, DIM, COMBINE
            )
        _store_result(row_max, row_sum, accumulator, out, None, None, pair, SHARED, DIM, COMBINE)


@gluon.jit
def store_part(
    low, high, row_max, row_sum, parts, sums, index, place, wanted, query,
    SHARED: gl.constexpr, HALF: gl.constexpr,
):  # fmt: skip
    """Write the part ``index``: halves of columns, at ``place`` in it."""
    place += index * (SHARED * 2 * HALF)
    gl.store(parts + place, low, mask=wanted)
    gl.store(parts + place + HALF, high, mask=wanted)
    gl.store(sums + (index * SHARED + query) * 2, row_max, mask=query < SHARED)
    gl.store(sums + (index * SHARED + query) * 2 + 1, row_sum, mask=query < SHARED)
