"""Linear layers with quantized weights for some dozens of rows and more: out = x Wᵀ + b.

A program widens tiles of codes in registers (``code_pairs``) and multiplies them, the weight as the
first operand, with tiles of x; where a layer has too few columns to keep the device busy, programs
share the width, and what reads their parts next adds them up (``norm.add_rms_norm``). Sums are
scaled where a group ends, in fp32; numbers of groups within a tile, or where the shape says so,
before the product, which rounds them.

``widen`` writes some rows of a weight in bf16, for the library's product: for very many rows that
is faster, and pieces are chosen that stay in the L2 cache meanwhile.

References: ``word_weight`` and ``penstock.kernels.linear``. bf16 and fp16; the interpreter takes
fp32, too.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.code_pairs import (
    e4m3_pairs,
    int8_pairs,
    nibble_pairs,
    numbers_of,
    zero_pairs,
)
from penstock.kernels.gpu.device_functions import dot
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.word_weight import KINDS, WordWeight
from penstock.kernels.quantized_kinds import SPACE_BYTES

_ZERO = tl.constexpr(8)


class TileShape(NamedTuple):
    """How a product is cut."""

    rows: int
    """Of x in a tile."""
    columns: int
    """Of out in a tile."""
    warps: int
    stages: int
    """Tiles under way."""
    splits: int = 1
    """Programs that share the width."""
    fold: bool = False
    """Whether scales of groups go into tiles of W, which rounds these, rather than into
    sums: then sums stay where the matrix unit adds to them."""


@triton.jit
def _spread_groups(values, COLUMNS: tl.constexpr, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """[COLUMNS, GROUPS] as [COLUMNS, WIDTH]."""
    wide = tl.broadcast_to(values[:, :, None], [COLUMNS, GROUPS, WIDTH // GROUPS])
    return tl.reshape(wide, [COLUMNS, WIDTH])


@triton.jit
def _widened_tile(
    words, zeros, column, begin, columns,
    KIND: tl.constexpr, GROUP: tl.constexpr, ZEROS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """A tile of codes less their zeros, [BLOCK_COLUMNS, STEP] numbers; begin: its first input."""
    if KIND == 0:
        words = tl.reshape(words, [BLOCK_COLUMNS, STEP // 128, 4, 4])
        words = tl.reshape(tl.permute(words, [0, 1, 3, 2]), [BLOCK_COLUMNS, STEP // 8])
        if ZEROS:
            GROUPS: tl.constexpr = STEP // GROUP if GROUP < STEP else 1
            group = begin // GROUP + tl.arange(0, GROUPS)
            place = group[None, :] * columns + column[:, None]
            zero = tl.load(zeros + place, mask=(column < columns)[:, None], other=0).to(tl.int32)
            zero = zero_pairs(zero, HALF)
            zero = _spread_groups(zero, BLOCK_COLUMNS, GROUPS, STEP // 8)
        else:
            zero = zero_pairs(tl.full([1, 1], _ZERO, tl.int32), HALF)
        near = tl.join(nibble_pairs(words, zero, 0, HALF), nibble_pairs(words, zero, 2, HALF))
        far = tl.join(nibble_pairs(words, zero, 1, HALF), nibble_pairs(words, zero, 3, HALF))
        pairs = tl.join(near, far)
    elif KIND == 1:
        pairs = tl.join(int8_pairs(words, False, HALF), int8_pairs(words, True, HALF))
    else:
        pairs = tl.join(e4m3_pairs(words, False, HALF), e4m3_pairs(words, True, HALF))
    return tl.reshape(numbers_of(pairs, HALF), [BLOCK_COLUMNS, STEP])


@triton.jit
def _scaled_tile(
    tile, scales, column, begin, columns, scales_stride,
    GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """A tile of several groups times their scales."""
    GROUPS: tl.constexpr = STEP // GROUP if GROUP < STEP else 1
    group = begin // GROUP + tl.arange(0, GROUPS)
    place = group[None, :] * scales_stride + (column // SCALE_ROWS)[:, None]
    scale = tl.load(scales + place, mask=(column < columns)[:, None], other=0.0).to(tl.float32)
    wide = _spread_groups(scale, BLOCK_COLUMNS, GROUPS, STEP)
    return (tile.to(tl.float32) * wide).to(tile.dtype)


@triton.jit(do_not_specialize=["rows"])
def _many_rows_kernel(
    x, words, scales, zeros, factor, bias, out, rows, columns, x_stride, out_stride, scales_stride,
    ROW_WORDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, STEP: tl.constexpr,
    SPLITS: tl.constexpr, FOLD: tl.constexpr, HALF: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile of ``out``, [BLOCK_ROWS, BLOCK_COLUMNS], a program; in transposed form."""
    begin_early(EARLY)
    CODES: tl.constexpr = 8 if KIND == 0 else 4
    PART: tl.constexpr = ROW_WORDS * CODES // SPLITS
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    split = tl.program_id(2)
    shown = column < columns
    first = split * PART
    source = words + column.to(tl.int64)[:, None] * ROW_WORDS
    source += first // CODES + tl.arange(0, STEP // CODES)[None, :]
    x_source = x + first + tl.arange(0, STEP)[:, None] + row.to(tl.int64)[None, :] * x_stride
    total = tl.zeros([BLOCK_COLUMNS, BLOCK_ROWS], tl.float32)
    for begin in range(0, PART, STEP):
        codes = tl.load(source + begin // CODES, mask=shown[:, None], other=0)
        right = tl.load(x_source + begin, mask=(row < rows)[None, :], other=0.0)
        at = first + begin
        left = _widened_tile(
            codes, zeros, column, at, columns, KIND, GROUP, ZEROS, BLOCK_COLUMNS, STEP, HALF
        )
        if SCALED and (FOLD or GROUP < STEP):
            left = _scaled_tile(
                left, scales, column, at, columns, scales_stride, GROUP, SCALE_ROWS, BLOCK_COLUMNS,
                STEP,
            )  # fmt: skip
        if SCALED and GROUP >= STEP and not FOLD:
            place = at // GROUP * scales_stride + column // SCALE_ROWS
            scale = tl.load(scales + place, mask=shown, other=0.0).to(tl.float32)
            total += dot(left, right) * scale[:, None]
        else:
            total += dot(left, right)
    if FACTOR:
        total *= tl.load(factor + column, mask=shown, other=0.0)[:, None]
    if BIAS:
        added = tl.load(bias + column, mask=shown & (split == 0), other=0.0).to(tl.float32)
        total += added[:, None]
    line = split * rows + row
    target = out + line.to(tl.int64)[None, :] * out_stride + column[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=shown[:, None] & (row < rows)[None, :])


@triton.jit
def _widen_kernel(
    words, scales, zeros, factor, out, first, last, columns, scales_stride,
    ROW_WORDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    CODES: tl.constexpr = 8 if KIND == 0 else 4
    near = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    column = first + near
    begin = tl.program_id(1) * STEP
    shown = (column < last)[:, None]
    place = begin // CODES + tl.arange(0, STEP // CODES)
    source = words + column.to(tl.int64)[:, None] * ROW_WORDS + place[None, :]
    codes = tl.load(source, mask=shown, other=0)
    tile = _widened_tile(
        codes, zeros, column, begin, columns, KIND, GROUP, ZEROS, BLOCK_COLUMNS, STEP, False
    ).to(tl.float32)
    if SCALED:
        tile = _scaled_tile(
            tile, scales, column, begin, columns, scales_stride, GROUP, SCALE_ROWS, BLOCK_COLUMNS,
            STEP,
        )  # fmt: skip
    if FACTOR:
        tile *= tl.load(factor + column, mask=column < columns, other=0.0)[:, None]
    target = out + near.to(tl.int64)[:, None] * (ROW_WORDS * CODES) + begin
    tl.store(target + tl.arange(0, STEP)[None, :], tile.to(out.dtype.element_ty), mask=shown)


def takes(weight: WordWeight, shape: TileShape) -> bool:
    """Whether so many programs can share the width."""
    step = tile_step(weight)
    width = weight.shape[1]
    return width % (step * shape.splits) == 0 and (
        weight.group >= width or width // shape.splits % max(weight.group, step) == 0
    )


def many_rows_codes(
    x: Tensor, weight: WordWeight, bias: Tensor | None, out: Tensor, shape: TileShape
) -> None:
    """x: [R, K]; bias: [N]; out: [R, N], any distance between rows of both; or with ``splits`` of
    the shape above 1 [splits, R, N] in fp32, contiguous, whose sum is the product."""
    rows, columns = len(x), weight.shape[0]
    scales = weight.scales
    grid = (-(-columns // shape.columns), -(-rows // shape.rows), shape.splits)
    _many_rows_kernel[grid](
        x, weight.words, scales, weight.zeros, weight.factor, bias, out, rows, columns, x.stride(0),
        out.stride(-2), 0 if scales is None else scales.shape[1], weight.words.shape[1],
        KINDS[weight.kind], weight.group, weight.rows, scales is not None,
        weight.zeros is not None, weight.factor is not None, bias is not None, shape.rows,
        shape.columns, tile_step(weight), shape.splits, shape.fold,
        x.dtype == torch.float16, EARLY,
        num_warps=shape.warps, num_stages=shape.stages, launch_pdl=EARLY,
    )  # fmt: skip


def widen(weight: WordWeight, first: int, out: Tensor) -> None:
    """Rows of the weight from ``first`` on, in the type of out [n, K], contiguous."""
    scales, step = weight.scales, 128
    _widen_kernel[(-(-len(out) // 32), weight.shape[1] // step)](
        weight.words, scales, weight.zeros, weight.factor, out, first, first + len(out),
        weight.shape[0], 0 if scales is None else scales.shape[1], weight.words.shape[1],
        KINDS[weight.kind], weight.group, weight.rows, scales is not None,
        weight.zeros is not None, weight.factor is not None, 32, step, EARLY,
        num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip


def piece_rows(weight: WordWeight, item_bytes: int) -> int:
    """Rows that are widened at once."""
    outputs, width = weight.shape
    return min(outputs, max(16, SPACE_BYTES // (width * item_bytes) // 128 * 128))


def widened_linear(
    x: Tensor, weight: WordWeight, bias: Tensor | None, out: Tensor, space: Tensor
) -> None:
    """x: [R, K]; out: [R, N]; space: as many numbers as ``piece_rows`` rows of the weight have, of
    their type."""
    outputs, width = weight.shape
    step = piece_rows(weight, x.element_size())
    for first in range(0, outputs, step):
        count = min(step, outputs - first)
        plain = space[: count * width].view(count, width)
        widen(weight, first, plain)
        target = out[:, first : first + count]
        if bias is None:
            torch.mm(x, plain.t(), out=target)
        else:
            torch.addmm(bias[first : first + count], x, plain.t(), out=target)


def tile_step(weight: WordWeight) -> int:
    """Columns of a tile of codes."""
    return 128 if weight.kind == "int4" else 64
