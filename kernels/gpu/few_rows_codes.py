"""Linear layers with quantized weights for a few rows, from codes that are widened in registers.

    out = x Wᵀ + b                                        plain
    out = SiLU(x W_gateᵀ) * (x W_upᵀ)                     ``gated``, W = [W_gate; W_up]

The product of ``few_rows_linear`` with another loader: of sixteen rows of W each warp has a part of
the width, a thread reads 16 bytes of a row at a time, right into registers, several steps ahead and
the first ones before the kernel ahead has ended (``early_launch``). A step is 128 columns of codes
of four bits, 64 of eight: ``SUBS`` products of 32 columns, which are permuted in both operands.
Sums are scaled where a group ends, in fp32: no weight is rounded.

References: ``word_weight``, ``penstock.kernels.linear`` and ``activation``. bf16 and fp16; the
interpreter takes fp32, too.
"""

# Tuples of tiles grow while the compiler unrolls a loop: no type of Python's says that.
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
from penstock.kernels.gpu.device_functions import INTERPRETED, silu_and_mul
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.word_weight import KINDS, WordWeight

_STEP_WORDS = 16
"""Words of a row that a warp reads at once: 64 bytes."""
_ZERO = tl.constexpr(8)
"""Of int4 without zeros."""


class Shape(NamedTuple):
    """How a product is cut."""

    blocks: int
    """Rows of W a program, in sixteens; gated: half of them gate, half up, of one block, too."""
    warps: int
    """They share the width."""
    depth: int
    """Steps of W in flight: so many registers of a thread times eight times ``blocks``."""
    x_depth: int
    """Steps of x in flight."""
    splits: int = 1
    """Programs that share the width."""


@triton.jit
def _left(tile, WARPS: tl.constexpr):
    """A tile of W, [2 halves * WARPS * 8 rows, 32], as the first operand: [WARPS, 16, 32].

    As in ``few_rows_linear``, but that of numbers that were joined the matrix unit takes four side
    by side from a thread, in two places of the width 16 apart.
    """
    parts = tl.reshape(tile, [2, WARPS, 8, 4, 2, 4])
    return tl.reshape(tl.permute(parts, [1, 0, 2, 4, 3, 5]), [WARPS, 16, 32])


@triton.jit
def _right(tile, WARPS: tl.constexpr):
    """A tile of x, [WARPS * 8 rows, 32], as the second operand: [WARPS, 32, 8]."""
    parts = tl.reshape(tile, [WARPS, 8, 4, 2, 4])
    return tl.reshape(tl.permute(parts, [0, 3, 2, 4, 1]), [WARPS, 32, 8])


@triton.jit
def _load_weights(source, up, BLOCKS: tl.constexpr, GATED: tl.constexpr, ROW_WORDS: tl.constexpr):
    """One step of all blocks of a program: the second half of them from ``up`` if ``GATED``."""
    tiles = ()
    for block in tl.static_range(BLOCKS):
        if GATED and block >= BLOCKS // 2:
            at = up + (block - BLOCKS // 2) * 16 * ROW_WORDS
        else:
            at = source + block * 16 * ROW_WORDS
        tiles += (tl.load(at, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_groups(
    values, row, group, upward, stride,
    BLOCKS: tl.constexpr, GATED: tl.constexpr, SCALE_ROWS: tl.constexpr,
):  # fmt: skip
    """Scales or zeros of a step of all blocks; row: of W, of the first block; group: of each
    warp."""
    tiles = ()
    for block in tl.static_range(BLOCKS):
        if GATED and block >= BLOCKS // 2:
            line = row + upward + (block - BLOCKS // 2) * 16
        else:
            line = row + block * 16
        tiles += (tl.load(values + group * stride + line // SCALE_ROWS),)
    return tiles


@triton.jit
def _load_rows(
    source, row, rows, x_stride, SUBS: tl.constexpr, NEAR: tl.constexpr, GROUPS: tl.constexpr
):
    """One step of all rows of x: for each product its groups of eight rows. Rows beyond ``rows``
    are zeros."""
    tiles = ()
    for sub in tl.static_range(SUBS):
        for group in tl.static_range(GROUPS):
            at = source + sub * NEAR + group * 8 * x_stride
            tiles += (tl.load(at, mask=row + group * 8 < rows, other=0.0),)
    return tiles


@triton.jit
def _widened(
    words, zeros, KIND: tl.constexpr, WARPS: tl.constexpr, PARTS: tl.constexpr, HALF: tl.constexpr
):
    """The tiles of a step, words [16 WARPS, 16], as first operands [WARPS, 16, 32]. zeros: one
    of each of ``PARTS`` groups."""
    parts = tl.reshape(words, [16 * WARPS, 4, 2, 2])
    even, odd = tl.split(parts)
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    if KIND == 0:
        tiles = ()
        quarters = (first, second, third, fourth)
        for quarter in tl.static_range(4):
            word, zero = quarters[quarter], zeros[quarter * PARTS // 4]
            near = tl.join(nibble_pairs(word, zero, 0, HALF), nibble_pairs(word, zero, 2, HALF))
            far = tl.join(nibble_pairs(word, zero, 1, HALF), nibble_pairs(word, zero, 3, HALF))
            both = numbers_of(tl.join(near, far), HALF)
            tiles += (_left(tl.reshape(both, [16 * WARPS, 32]), WARPS),)
        return tiles
    else:
        return (
            _left(_eight_codes(first, second, KIND, WARPS, HALF), WARPS),
            _left(_eight_codes(third, fourth, KIND, WARPS, HALF), WARPS),
        )


@triton.jit
def _eight_codes(first, second, KIND: tl.constexpr, WARPS: tl.constexpr, HALF: tl.constexpr):
    """Two words of four codes of each row and thread, as [16 WARPS, 32] numbers."""
    if KIND == 1:
        near = tl.join(int8_pairs(first, False, HALF), int8_pairs(second, False, HALF))
        far = tl.join(int8_pairs(first, True, HALF), int8_pairs(second, True, HALF))
    else:
        near = tl.join(e4m3_pairs(first, False, HALF), e4m3_pairs(second, False, HALF))
        far = tl.join(e4m3_pairs(first, True, HALF), e4m3_pairs(second, True, HALF))
    return tl.reshape(numbers_of(tl.join(near, far), HALF), [16 * WARPS, 32])


@triton.jit
def _multiply(
    tiles, x_tiles, scales, zeros, totals,
    KIND: tl.constexpr, SUBS: tl.constexpr, PARTS: tl.constexpr, GROUPS: tl.constexpr,
    BLOCKS: tl.constexpr, WARPS: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    HALF: tl.constexpr,
):  # fmt: skip
    """``totals`` plus the products of the first step. PARTS: groups of columns in a step."""
    rights = ()
    for at in tl.static_range(SUBS * GROUPS):
        rights += (_right(x_tiles[at], WARPS),)
    new_totals = ()
    for block in tl.static_range(BLOCKS):
        block_zeros = ()
        for part in tl.static_range(PARTS):
            if ZEROS:
                zero = zeros[part * BLOCKS + block].to(tl.int32)
                block_zeros += (zero_pairs(zero, HALF),)
            else:
                block_zeros += (zero_pairs(tl.full([1, 1], _ZERO, tl.int32), HALF),)
        lefts = _widened(tiles[block], block_zeros, KIND, WARPS, PARTS, HALF)
        for group in tl.static_range(GROUPS):
            total = totals[block * GROUPS + group]
            for part in tl.static_range(PARTS):
                if SCALED:
                    product = tl.zeros([WARPS, 16, 8], tl.float32)
                else:
                    product = total
                for near in tl.static_range(SUBS // PARTS):
                    left = lefts[part * (SUBS // PARTS) + near]
                    right = rights[(part * (SUBS // PARTS) + near) * GROUPS + group]  # type: ignore[var-annotated]
                    if INTERPRETED:
                        left, right = left.to(tl.float32), right.to(tl.float32)
                    product = tl.dot(left, right, product, input_precision="ieee")
                if SCALED:
                    total += product * scales[part * BLOCKS + block].to(tl.float32)
                else:
                    total = product
            new_totals += (total,)
    return new_totals


@triton.jit(do_not_specialize=["rows"])
def _few_rows_codes_kernel(
    x, words, scales, zeros, factor, bias, out, rows, columns, x_stride, out_stride, scales_stride,
    ROW_WORDS: tl.constexpr, KIND: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    SCALED: tl.constexpr, ZEROS: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr,
    GATED: tl.constexpr, GROUPS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    DEPTH: tl.constexpr, X_DEPTH: tl.constexpr, SPLITS: tl.constexpr, HALF: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """``16 BLOCKS`` rows of W a program, times ``8 GROUPS`` rows of x, over a part of the width."""
    outs: tl.constexpr = 8 * BLOCKS if GATED else 16 * BLOCKS
    # Blocks of gate and blocks of up, or one block with eight rows of either.
    PAIRED: tl.constexpr = GATED and BLOCKS > 1
    MIXED: tl.constexpr = GATED and BLOCKS == 1
    SUBS: tl.constexpr = 4 if KIND == 0 else 2
    NEAR: tl.constexpr = 32 if KIND == 0 else 8
    step_columns: tl.constexpr = 32 * SUBS
    steps: tl.constexpr = ROW_WORDS // (WARPS * SPLITS) // 16
    PARTS: tl.constexpr = max(1, step_columns // GROUP)
    first = tl.program_id(0) * outs
    split = tl.program_id(1)
    upward = columns.to(tl.int64) * ROW_WORDS
    at = tl.arange(0, 16 * WARPS)[:, None]
    half_of_tile = at // (8 * WARPS)
    near_line = tl.arange(0, 16)[None, :, None]
    if MIXED:
        row_of_tile = half_of_tile.to(tl.int64) * columns + at % 8
        line = first + near_line // 8 * columns + near_line % 8
    else:
        row_of_tile = half_of_tile * 8 + at % 8
        line = first + near_line
    warp_of_tile = split * WARPS + at // 8 % WARPS
    place = row_of_tile * ROW_WORDS + warp_of_tile * (steps * 16) + tl.arange(0, 16)[None, :]
    source = words + first.to(tl.int64) * ROW_WORDS + place
    zeros_stride = columns * 2 if GATED else columns
    # Of a total: scales of its rows, in the group of its warp.
    warp = split * WARPS + tl.arange(0, WARPS)[:, None, None]

    tiles = ()
    scale_tiles = ()
    zero_tiles = ()
    for step in tl.static_range(DEPTH):
        here = source + step * 16
        tiles += _load_weights(here, here + upward, BLOCKS, PAIRED, ROW_WORDS)
        if SCALED:
            for part in tl.static_range(PARTS):
                group = ((warp * steps + step) * step_columns + part * GROUP) // GROUP
                scale_tiles += _load_groups(
                    scales, line, group, columns, scales_stride, BLOCKS, PAIRED, SCALE_ROWS
                )
        if ZEROS:
            for part in tl.static_range(PARTS):
                group = ((warp_of_tile * steps + step) * step_columns + part * GROUP) // GROUP
                zero_tiles += _load_groups(
                    zeros, first + row_of_tile, group, columns, zeros_stride, BLOCKS, PAIRED, 1
                )
    row = tl.arange(0, 8 * WARPS)[:, None]
    eighth = row % 8
    near = tl.arange(0, 32)[None, :]
    if KIND == 0:
        column = near
    else:
        column = near // 8 * 16 + near % 8
    begin_early(EARLY)

    share = split * WARPS + row // 8
    x_source = x + eighth * x_stride + share * (steps * step_columns) + column
    x_tiles = ()
    for step in tl.static_range(X_DEPTH):
        here = x_source + step * step_columns
        x_tiles += _load_rows(here, eighth, rows, x_stride, SUBS, NEAR, GROUPS)
    totals = ()
    for _ in tl.static_range(GROUPS * BLOCKS):
        totals += (tl.zeros([WARPS, 16, 8], tl.float32),)
    # Without a loop in the program: values of 16 bits take a register each from turn to turn.
    for step in tl.static_range(steps):
        if step + X_DEPTH < steps:
            here = x_source + (step + X_DEPTH) * step_columns
            x_tiles += _load_rows(here, eighth, rows, x_stride, SUBS, NEAR, GROUPS)
        if step + DEPTH < steps:
            here = source + (step + DEPTH) * 16
            tiles += _load_weights(here, here + upward, BLOCKS, PAIRED, ROW_WORDS)
            if SCALED:
                for part in tl.static_range(PARTS):
                    group = ((warp * steps + step + DEPTH) * step_columns + part * GROUP) // GROUP
                    scale_tiles += _load_groups(
                        scales, line, group, columns, scales_stride, BLOCKS, PAIRED, SCALE_ROWS
                    )
            if ZEROS:
                for part in tl.static_range(PARTS):
                    group = (
                        (warp_of_tile * steps + step + DEPTH) * step_columns + part * GROUP
                    ) // GROUP
                    zero_tiles += _load_groups(
                        zeros, first + row_of_tile, group, columns, zeros_stride, BLOCKS, PAIRED, 1
                    )
        totals = _multiply(
            tiles, x_tiles, scale_tiles, zero_tiles, totals, KIND, SUBS, PARTS, GROUPS, BLOCKS,
            WARPS, SCALED, ZEROS, HALF,
        )  # fmt: skip
        tiles = tiles[BLOCKS:]
        x_tiles = x_tiles[SUBS * GROUPS :]
        if SCALED:
            scale_tiles = scale_tiles[PARTS * BLOCKS :]
        if ZEROS:
            zero_tiles = zero_tiles[PARTS * BLOCKS :]

    near_row = tl.arange(0, 8)[None, :]
    LINES: tl.constexpr = 8 if MIXED else 16
    for group in tl.static_range(GROUPS):
        for block in tl.static_range(outs // LINES):
            of = first + block * 16 + tl.arange(0, LINES)[:, None]
            result = tl.sum(totals[block * GROUPS + group], 0)
            if MIXED:
                halves = tl.permute(tl.reshape(result, [2, 8, 8]), [1, 2, 0])
                result, up = tl.split(halves)
            elif GATED:
                up = tl.sum(totals[(BLOCKS // 2 + block) * GROUPS + group], 0)
            if FACTOR:
                result *= tl.load(factor + of)
            if BIAS:
                added = tl.load(bias + of, mask=(split == 0) & (of < columns), other=0.0)
                result += added.to(tl.float32)
            if GATED:
                if FACTOR:
                    up *= tl.load(factor + columns + of)
                if BIAS:
                    up += tl.load(bias + columns + of).to(tl.float32)
                result = silu_and_mul(result, up)
            row_of_out = group * 8 + near_row
            target = out + (split * rows + row_of_out) * out_stride + of
            tl.store(target, result.to(out.dtype.element_ty), mask=row_of_out < rows)


def takes(weight: WordWeight, warps: int) -> bool:
    """Whether so many warps, of all programs that share it, can share the width."""
    return weight.words.shape[1] % (_STEP_WORDS * warps) == 0 and weight.group % 32 == 0


def few_rows_codes(
    x: Tensor, weight: WordWeight, bias: Tensor | None, out: Tensor, shape: Shape, *,
    gated: bool = False,
) -> None:  # fmt: skip
    """x: [R, K]; weight: [N, K], or [2 N, K] if ``gated``; bias: as many as the weight's rows; out:
    [R, N], any distance between rows of x and of out; or with ``splits`` of the shape above 1, and
    no gate, [splits, R, N] in fp32, contiguous, whose sum is the product. One program holds all R
    rows in registers: meant for up to 32."""
    rows, columns = len(x), out.shape[-1]
    blocks, warps, depth, x_depth, splits = shape
    steps = weight.words.shape[1] // (_STEP_WORDS * warps * splits)
    scales = weight.scales
    _few_rows_codes_kernel[(columns // ((8 if gated else 16) * blocks), splits)](
        x, weight.words, scales, weight.zeros, weight.factor, bias, out, rows, columns, x.stride(0),
        out.stride(-2), 0 if scales is None else scales.shape[1], weight.words.shape[1],
        KINDS[weight.kind], weight.group, weight.rows, scales is not None, weight.zeros is not None,
        weight.factor is not None, bias is not None, gated, -(-rows // 8), blocks, warps,
        min(depth, steps), min(x_depth, steps), splits, x.dtype == torch.float16, EARLY,
        num_warps=warps, launch_pdl=EARLY,
    )  # fmt: skip
