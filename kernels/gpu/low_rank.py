"""Low-rank updates of a linear layer's results on a GPU, of rows with different adapters.

    small[i] = A x[order[i]]              ``shrink``
    out[order[i]] += B small[i]           ``expand``

A and B are those of the row's adapter, whose scale is in B. The adapters of a layer are stacked in
one buffer, filled up with zeros to one rank, so that one may take the place of another while graphs
of these launches stay valid. A step's rows are sorted by adapter and cut into tiles of one adapter
each (``row_tiles``): A and B are read once for a tile, by tensor cores. How many tiles are launched
follows from the number of rows alone; those that a step does not have end at once. (Segmented
products as in Punica's SGMV, arXiv 2310.18547, and S-LoRA, arXiv 2311.03285.)

Reference: ``penstock.kernels.low_rank.add_stacked``.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import dot
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.low_rank import StackedLowRank

FEW_TILE, MANY_TILE = 16, 64
"""Rows of a tile in steps of decode rows, which have an adapter each, and in others, where the rows
of a prompt have the same."""
RANK_UNIT = 16
"""Ranks are filled up to a multiple of it: tensor cores take no fewer."""
_MOST_RANKS, _COLUMNS = 64, 128
_SMALL_TILE = 256
"""Sums of a program of ``shrink`` that two warps are faster for than four: by 3 to 13 % on an H100
(64 adapters of rank 16, 256 rows)."""
SPLIT_ROWS, _SPLITS, _MOST_SPLITS, _WIDE = 512, 4, 8, 8192
"""Inputs are divided among programs in steps of up to so many rows: among four, ``_WIDE`` inputs
and more among eight."""
_FEW_PROGRAMS, _MOST_TURNS, _LOW_RANK = 512, 8, 32
"""Programs that fill a GPU, and blocks of outputs that one has at most (``expand``). Of lower ranks
than ``_LOW_RANK`` one block a program is as fast."""
IntArray = npt.NDArray[np.int64]


class RowTiles(NamedTuple):
    """The rows of a step that have adapters, on the device."""

    order: Tensor
    """[N] int32: rows, those of one adapter one after another."""
    tiles: Tensor
    """[3, T] int32: adapter of each tile, -1: there is no such tile; its first place in ``order``;
    its number of rows."""
    launched: int
    """Tiles that are launched."""
    rows: int
    """Rows of the step, at most."""
    size: int
    """Rows of a tile."""
    adapters: Tensor
    """[N] int32, of the first ``SPLIT_ROWS`` rows: the adapter of each, -1: none."""


def most_tiles(rows: int, size: int, adapters: int) -> int:
    """Tiles of ``size`` that so many rows of so many adapters have at most."""
    return min(rows, -(-rows // size) + min(adapters, rows))


def row_tiles(adapters: IntArray, size: int) -> tuple[IntArray, IntArray]:
    """``order`` and ``tiles`` of rows with these adapters, -1: none."""
    rows = np.flatnonzero(adapters >= 0)
    order = rows[np.argsort(adapters[rows], kind="stable")]
    found, counts = np.unique(adapters[order], return_counts=True)
    tiles = -(-counts // size)
    group = np.repeat(np.arange(len(found)), tiles)
    within = size * (np.arange(len(group)) - np.repeat(np.cumsum(tiles) - tiles, tiles))
    first = (np.cumsum(counts) - counts)[group] + within
    return order, np.stack((found[group], first, np.minimum(size, counts[group] - within)))


def padded_rank(rank: int) -> int:
    """The rank that adapters of up to ``rank`` are filled up to."""
    return -(-rank // RANK_UNIT) * RANK_UNIT


def small_numbers(rows: int, width: int) -> int:
    """Numbers that ``shrink`` writes at most for so many rows; width: see ``StackedLowRank``."""
    return max(rows, min(rows, SPLIT_ROWS) * _MOST_SPLITS) * width


def _splits(inputs: int, rows: int) -> int:
    if rows > SPLIT_ROWS:
        return 1
    return _MOST_SPLITS if inputs >= _WIDE else _SPLITS


@triton.jit(do_not_specialize=["most", "rows"])
def _shrink_kernel(
    x, down, small, order, tiles, ranks, most, rows, inputs, rank, width, split,
    TILE: tl.constexpr, RANKS: tl.constexpr, INPUTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile's rows, ``RANKS`` ranks and ``split`` inputs a program. ``expand`` may be launched at
    once, and waits; this kernel is not launched before what is ahead of it has ended."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tile = tl.program_id(0)
    # What does not depend on each other is asked for at once: a program is mostly waiting.
    slot = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + most + tile)
    place = tl.arange(0, TILE)
    inside = (place < tl.load(tiles + 2 * most + tile)) & (slot >= 0)
    held = tl.load(ranks + slot, mask=slot >= 0, other=0)
    row = tl.load(order + first + place, mask=inside, other=0).to(tl.int64)
    first_rank = tl.program_id(1) * RANKS
    if first_rank % rank < held:
        number = first_rank + tl.arange(0, RANKS)
        filled = (first_rank % rank + tl.arange(0, RANKS) < held)[:, None]
        begin = tl.program_id(2) * split
        end = tl.minimum(begin + split, inputs)
        a = down + (slot * width + number)[:, None] * inputs
        total = tl.zeros([TILE, RANKS], tl.float32)
        for start in range(begin, end, INPUTS):
            column = start + tl.arange(0, INPUTS)[None, :]
            mask = inside[:, None] & (column < end)
            part = tl.load(x + row[:, None] * inputs + column, mask=mask, other=0.0)
            weight = tl.load(a + column, mask=filled & (column < end), other=0.0)
            total += dot(part, tl.trans(weight))
        out = small + (tl.program_id(2) * rows + first + place).to(tl.int64)[:, None] * width
        tl.store(out + number[None, :], total, mask=inside[:, None])


@triton.jit
def _shrunk(source, number, inside, rows, width, SPLITS: tl.constexpr):
    """What ``shrink`` has written for a tile's rows and these ranks: the sum of its splits."""
    if SPLITS == 1:
        return tl.load(source + number, mask=inside, other=0.0)
    else:
        piece = tl.arange(0, SPLITS)[:, None, None] * (rows.to(tl.int64) * width)
        places = piece + (source + number)[None, :, :]
        return tl.sum(tl.load(places, mask=inside[None, :, :], other=0.0), 0)


@triton.jit
def _of_part(group, first_groups, second_groups, first_outputs, second_outputs, outputs,
             SPAN: tl.constexpr):  # fmt: skip
    """Which part a group of ``SPAN`` outputs is of, the first of them, and where they end."""
    second = group >= first_groups
    third = group >= first_groups + second_groups
    part = second.to(tl.int32) + third.to(tl.int32)
    ahead = tl.where(third, first_groups + second_groups, tl.where(second, first_groups, 0))
    begin = tl.where(third, first_outputs + second_outputs, tl.where(second, first_outputs, 0))
    end = tl.where(third, outputs, tl.where(second, first_outputs + second_outputs, first_outputs))
    begin = tl.multiple_of(begin, 16) + (group - ahead) * SPAN
    return part, begin, tl.minimum(begin + SPAN, end)


@triton.jit
def _factor(source, number, inside, rows, width, type, SPLITS: tl.constexpr,
            TURNED: tl.constexpr):  # fmt: skip
    """What ``_shrunk`` gives, for ``_product``."""
    shrunk = _shrunk(source, number, inside, rows, width, SPLITS).to(type)
    return tl.trans(shrunk) if TURNED else shrunk


@triton.jit
def _product(shrunk, weight, TURNED: tl.constexpr):
    """[rows, outputs], or, TURNED, [outputs, rows]: the fastest instructions of tensor cores take
    the outputs for rows, and as few columns as a tile of few rows has."""
    return dot(weight, shrunk) if TURNED else dot(shrunk, tl.trans(weight))


@triton.jit
def _write_block(
    out, source, of_columns, weight, shrunk, number, row, inside, column, end, held, rows, width,
    outputs,
    RANK: tl.constexpr, RANKS: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr,
    ADD: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    """A block of outputs, of whose weights those of the first ``RANKS`` ranks are there."""
    total = _product(shrunk, weight, TURNED)
    asked = column < end
    if RANK > RANKS:
        for first in range(RANKS, held, RANKS):
            more = tl.load(of_columns + first, mask=asked[:, None], other=0.0)
            also = _factor(
                source, first + number, inside[:, None], rows, width, weight.dtype, SPLITS, TURNED
            )
            total += _product(also, more, TURNED)
    if TURNED:
        target, wanted = row[None, :] * outputs + column[:, None], inside[None, :]
        if not EVEN:
            wanted = wanted & asked[:, None]
    else:
        target, wanted = row[:, None] * outputs + column[None, :], inside[:, None]
        if not EVEN:
            wanted = wanted & asked[None, :]
    if ADD:
        total += tl.load(out + target, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out + target, total.to(out.dtype.element_ty), mask=wanted)


@triton.jit(do_not_specialize=["most", "rows", "first_groups", "second_groups"])
def _expand_kernel(
    small, up, out, order, tiles, ranks, most, rows, width, outputs, first_groups, second_groups,
    first_outputs, second_outputs,
    TILE: tl.constexpr, RANK: tl.constexpr, RANKS: tl.constexpr, COLUMNS: tl.constexpr,
    TURNS: tl.constexpr, EVEN: tl.constexpr, SPLITS: tl.constexpr, ADD: tl.constexpr,
    TURNED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile's rows and ``TURNS`` blocks of ``COLUMNS`` outputs of one part a program. EVEN:
    each part has whole blocks of these, so that loads and stores of many numbers at once need no
    masks; ADD: to what is there; TURNED: see ``_product``."""
    tile = tl.program_id(0)
    slot = tl.load(tiles + tile).to(tl.int64)
    first = tl.load(tiles + most + tile)
    place = tl.arange(0, TILE)
    inside = (place < tl.load(tiles + 2 * most + tile)) & (slot >= 0)
    held = tl.load(ranks + slot, mask=slot >= 0, other=0)
    row = tl.load(order + first + place, mask=inside, other=0).to(tl.int64)
    part, begin, end = _of_part(
        tl.program_id(1), first_groups, second_groups, first_outputs, second_outputs, outputs,
        COLUMNS * TURNS,
    )  # fmt: skip
    number, across = tl.arange(0, RANKS)[None, :], tl.arange(0, COLUMNS)
    source = small + (first + place).to(tl.int64)[:, None] * width + part * RANK
    b = up + slot * outputs * RANK + number
    type = up.dtype.element_ty
    if TURNS == 1:
        column = begin + across
        of_columns = b + column[:, None] * RANK
        asked = held > 0
        if not EVEN:
            asked = asked & (column < end)[:, None]
        # Weights are read while what comes before is under way.
        weight = tl.load(of_columns, mask=asked, other=0.0)
        begin_early(EARLY)
        if held > 0:
            shrunk = _factor(source, number, inside[:, None], rows, width, type, SPLITS, TURNED)
            _write_block(
                out, source, of_columns, weight, shrunk, number, row, inside, column, end, held,
                rows, width, outputs, RANK, RANKS, EVEN, SPLITS, ADD, TURNED,
            )  # fmt: skip
    else:
        begin_early(EARLY)
        if held > 0:
            shrunk = _factor(source, number, inside[:, None], rows, width, type, SPLITS, TURNED)
            for start in range(begin, end, COLUMNS):
                column = start + across
                of_columns = b + column[:, None] * RANK
                if EVEN:
                    weight = tl.load(of_columns)
                else:
                    weight = tl.load(of_columns, mask=(column < end)[:, None], other=0.0)
                _write_block(
                    out, source, of_columns, weight, shrunk, number, row, inside, column, end,
                    held, rows, width, outputs, RANK, RANKS, EVEN, SPLITS, ADD, TURNED,
                )  # fmt: skip


def shrink(x: Tensor, layer: StackedLowRank, ranks: Tensor, step: RowTiles, small: Tensor) -> None:
    """Write what A makes of the rows.

    x: [N, inputs] contiguous; ranks: [adapters] int32, the highest rank that each has anywhere;
    small: fp32, ``small_numbers``, for ``expand``.
    """
    _, width, inputs = layer.down.shape
    rank, splits = layer.up.shape[2], _splits(inputs, step.rows)
    block = _ranks_at_once(layer)
    columns = 128 if x.dtype.itemsize < 4 else 64
    split = triton.cdiv(triton.cdiv(inputs, splits), columns) * columns
    _shrink_kernel[(step.launched, width // block, splits)](
        x, layer.down, small, step.order, step.tiles, ranks, step.tiles.shape[1], step.rows,
        inputs, rank, width, split, step.size, block, columns, EARLY,
        num_warps=2 if step.size * block <= _SMALL_TILE else 4, num_stages=3,
    )  # fmt: skip


def expand(
    out: Tensor,
    layer: StackedLowRank,
    ranks: Tensor,
    step: RowTiles,
    small: Tensor,
    *,
    add: bool = True,
) -> None:
    """Add to ``out`` what B makes of what ``shrink`` has written with the same arguments, or write
    it there; rows without an adapter are not touched.

    out: [N, outputs] contiguous, of x's type or fp32.
    """
    _, width, inputs = layer.down.shape
    _, outputs, rank = layer.up.shape
    blocks = sum(triton.cdiv(part, _COLUMNS) for part in layer.parts)
    turns = _turns(step.launched * blocks) if rank >= _LOW_RANK else 1
    groups = [triton.cdiv(part, _COLUMNS * turns) for part in layer.parts]
    even = all(part % _COLUMNS == 0 for part in layer.parts)
    _expand_kernel[(step.launched, sum(groups))](
        small, layer.up, out, step.order, step.tiles, ranks, step.tiles.shape[1], step.rows, width,
        outputs, *(*groups, 0)[:2], *(*layer.parts, 0)[:2], step.size, rank,
        _ranks_at_once(layer), _COLUMNS, turns, even, _splits(inputs, step.rows), add,
        turns > 1 and step.size < MANY_TILE, EARLY,
        num_warps=4, num_stages=3 if layer.up.dtype.itemsize < 4 else 2, launch_pdl=EARLY,
    )  # fmt: skip


def _turns(blocks: int) -> int:
    """Blocks of outputs that a program of ``expand`` computes one after the other, the next ones on
    their way meanwhile: a program finds its tile and the tile's small numbers once for all of them,
    and enough programs remain."""
    turns = 1
    while turns < _MOST_TURNS and blocks >= 2 * turns * _FEW_PROGRAMS:
        turns *= 2
    return max(turns, 2) if blocks >= _FEW_PROGRAMS else turns


def _ranks_at_once(layer: StackedLowRank) -> int:
    """A power of two that divides the rank; in fp32 more would need too much shared memory."""
    rank, narrow = layer.up.shape[2], layer.up.dtype.itemsize < 4
    return min(_MOST_RANKS if narrow else _MOST_RANKS // 2, rank & -rank)
