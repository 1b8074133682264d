"""Linear layers for a few rows, with what stands around them: norm before, gate or sum after.

    out = x Wᵀ + b                                        plain
    out = rms_norm(x) Wᵀ                                  with ``norm_weight``
    out = SiLU(x W_gateᵀ) * (x W_upᵀ)                     ``gated``, W = [W_gate; W_up]
    out += x Wᵀ + b                                       ``add``, the residual stream in place

The same layers as ``skinny_linear``, on the matrix unit. Its first operand is W, sixteen rows of
it, the second eight rows of x; every warp has a part of the width to itself, and the warps'
sums are added at the end, always in the same order. So each value of W is read once by one thread,
16 bytes at a time, right into the register that the matrix unit takes it from: a product does not
change when the width is permuted in both operands, and in the order chosen here what a thread
loads together is what it multiplies (``_left``, ``_right``).

The norm is the factor that is left out of the sum and applied at its end; x times the norm's weight
is rounded to x's type. A program reads the first columns of its rows of W before the kernel ahead
of it has ended (``early_launch``).

References: ``penstock.kernels.linear``, ``rms_norm`` and ``activation``.

bf16 and fp32 only: in fp16 the residual stream times the norm's weight might overflow. fp32 is not
what the matrix unit is for: correct, but meant for small layers.
"""

# Tuples of tiles grow while the compiler unrolls a loop: no type of Python's says that.
# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import rms_scale, silu_and_mul
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.kernel_table import chosen


class Shape(NamedTuple):
    """How a product is cut. Steps are of 32 columns of the width for each warp."""

    blocks: int
    """Rows of W a program, in sixteens; gated: half of them gate, half up."""
    warps: int
    depth: int
    """Steps of W in flight: so many registers of a thread times eight times ``blocks``."""
    x_depth: int
    """Steps of x in flight."""


MOST_ROWS = 16
"""Above, the library's products with separate kernels around them are faster."""
NARROW = 2048
"""Weights of a smaller width than this are read faster by this kernel: than by the library for up
to ``MOST_ROWS`` rows, than by ``skinny_linear`` for one. ``rows_linear_hopper`` is faster for
wider ones, and from a few rows on."""
SHAPES: dict[tuple[int, int, int], Shape] = {
    (4096, 1024, 1): Shape(1, 4, 8, 8),
    (1024, 2048, 1): Shape(1, 4, 16, 4),
    (1024, 3072, 1): Shape(1, 8, 12, 8),
    (4096, 1024, 2): Shape(2, 4, 8, 4),
    (1024, 2048, 2): Shape(1, 8, 8, 8),
    (1024, 3072, 2): Shape(1, 4, 16, 4),
}
"""The fastest of eight to twelve, on an H200: by columns of ``out``, width and eights of rows."""
GATED_SHAPES: dict[tuple[int, int, int], Shape] = {
    (3072, 1024, 1): Shape(2, 4, 8, 4),
    (3072, 1024, 2): Shape(2, 4, 8, 4),
}
"""As ``SHAPES``; blocks are even, half of them gate."""


@triton.jit
def _left(tile, WARPS: tl.constexpr):
    """A tile of W, [2 halves * WARPS * 8 rows, 32], as the first operand: [WARPS, 16, 32].

    The matrix unit takes from a thread two numbers of four places of the width, 8 apart; the
    thread has 8 numbers side by side.
    """
    parts = tl.reshape(tile, [2, WARPS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [1, 0, 2, 4, 5, 3, 6]), [WARPS, 16, 32])


@triton.jit
def _right(tile, WARPS: tl.constexpr):
    """A tile of x, [WARPS * 8 rows, 32], as the second operand: [WARPS, 32, 8]."""
    parts = tl.reshape(tile, [WARPS, 8, 4, 2, 2, 2])
    return tl.reshape(tl.permute(parts, [0, 3, 4, 2, 5, 1]), [WARPS, 32, 8])


@triton.jit
def _load_weights(source, up, BLOCKS: tl.constexpr, GATED: tl.constexpr, WIDTH: tl.constexpr):
    """One step of all blocks of a program: the second half of them from ``up`` if ``GATED``."""
    tiles = ()
    for block in tl.static_range(BLOCKS):
        if GATED and block >= BLOCKS // 2:
            at = up + (block - BLOCKS // 2) * 16 * WIDTH
        else:
            at = source + block * 16 * WIDTH
        tiles += (tl.load(at, eviction_policy="evict_first"),)
    return tiles


@triton.jit
def _load_rows(source, row, rows, GROUPS: tl.constexpr, WIDTH: tl.constexpr):
    """One step of all rows of x, in groups of eight. Rows beyond ``rows`` are zeros."""
    tiles = ()
    for group in tl.static_range(GROUPS):
        at = source + group * 8 * WIDTH
        tiles += (tl.load(at, mask=row + group * 8 < rows, other=0.0),)
    return tiles


@triton.jit
def _multiply(
    tiles, x_tiles, factors, totals, squares,
    GROUPS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """``totals`` plus the products of the first step of ``tiles``, and the sums of squares."""
    new_totals = ()
    new_squares = ()
    for group in tl.static_range(GROUPS):
        part = x_tiles[group]
        if NORM:
            wide = part.to(tl.float32)
            square = tl.sum(tl.reshape(wide * wide, [8 * WARPS, 4, 8]), 2)
            new_squares += (squares[group] + square,)
            part = (wide * factors[0].to(tl.float32)).to(part.dtype)
        else:
            new_squares += (squares[group],)
        right = _right(part, WARPS)
        for block in tl.static_range(BLOCKS):
            total = totals[group * BLOCKS + block]
            total = tl.dot(_left(tiles[block], WARPS), right, total, input_precision="ieee")
            new_totals += (total,)
    return new_totals, new_squares


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x, weight, bias, norm_weight, out, eps, rows, columns,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, BLOCKS: tl.constexpr, WARPS: tl.constexpr,
    DEPTH: tl.constexpr, X_DEPTH: tl.constexpr, NORM: tl.constexpr, GATED: tl.constexpr,
    BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``16 BLOCKS`` rows of W a program, times ``8 GROUPS`` rows of x."""
    outs: tl.constexpr = 8 * BLOCKS if GATED else 16 * BLOCKS
    warp_width: tl.constexpr = WIDTH // WARPS
    steps: tl.constexpr = warp_width // 32
    first = tl.program_id(0) * outs
    begin = weight + first.to(tl.int64) * WIDTH
    upward = columns.to(tl.int64) * WIDTH
    near = tl.arange(0, 32)[None, :]
    at = tl.arange(0, 16 * WARPS)[:, None]
    place = (at // (8 * WARPS) * 8 + at % 8) * WIDTH + at // 8 % WARPS * warp_width + near
    source = begin + place

    tiles = ()
    for step in tl.static_range(DEPTH):
        here = source + step * 32
        tiles += _load_weights(here, here + upward, BLOCKS, GATED, WIDTH)
    row_at = tl.arange(0, 8 * WARPS)[:, None]
    eighth = row_at % 8
    column = row_at // 8 * warp_width + near
    factors = ()
    if NORM:
        factor_source = norm_weight + column
        for step in tl.static_range(X_DEPTH):
            factors += (tl.load(factor_source + step * 32),)
    begin_early(EARLY)

    x_source = x + eighth * WIDTH + column
    x_tiles = ()
    for step in tl.static_range(X_DEPTH):
        x_tiles += _load_rows(x_source + step * 32, eighth, rows, GROUPS, WIDTH)
    totals = ()
    squares = ()
    for _ in tl.static_range(GROUPS):
        squares += (tl.zeros([8 * WARPS, 4], tl.float32),)
        for _ in tl.static_range(BLOCKS):
            totals += (tl.zeros([WARPS, 16, 8], tl.float32),)
    # Without a loop in the program: values of 16 bits take a register each from turn to turn.
    for step in tl.static_range(steps):
        if step + X_DEPTH < steps:
            here = x_source + (step + X_DEPTH) * 32
            x_tiles += _load_rows(here, eighth, rows, GROUPS, WIDTH)
            if NORM:
                factors += (tl.load(factor_source + (step + X_DEPTH) * 32),)
        if step + DEPTH < steps:
            here = source + (step + DEPTH) * 32
            tiles += _load_weights(here, here + upward, BLOCKS, GATED, WIDTH)
        totals, squares = _multiply(
            tiles, x_tiles, factors, totals, squares, GROUPS, BLOCKS, WARPS, NORM
        )
        tiles = tiles[BLOCKS:]
        x_tiles = x_tiles[GROUPS:]
        if NORM:
            factors = factors[1:]

    near_row = tl.arange(0, 8)[None, :]
    for group in tl.static_range(GROUPS):
        if NORM:
            square_sum = tl.sum(tl.reshape(tl.sum(squares[group], 1), [WARPS, 8]), 0)
            scale = rms_scale(square_sum, eps, WIDTH)[None, :]
        for block in tl.static_range(outs // 16):
            of = first + block * 16 + tl.arange(0, 16)[:, None]
            row = group * 8 + near_row
            inside = row < rows
            result = tl.sum(totals[group * BLOCKS + block], 0)
            if NORM:
                result *= scale
            if BIAS:
                result += tl.load(bias + of).to(tl.float32)
            if GATED:
                up = tl.sum(totals[group * BLOCKS + BLOCKS // 2 + block], 0)
                if NORM:
                    up *= scale
                if BIAS:
                    up += tl.load(bias + columns + of).to(tl.float32)
                result = silu_and_mul(result, up)
            target = out + row * columns + of
            if ADD:
                result += tl.load(target, mask=inside, other=0.0).to(tl.float32)
            tl.store(target, result.to(out.dtype.element_ty), mask=inside)


def fits(width: int, columns: int) -> bool:
    """Whether the kernel takes a weight of [columns, width], gated: of [2 columns, width]."""
    return width % 128 == 0 and columns % 16 == 0


def takes(shape: Shape, columns: int, width: int, gated: bool) -> bool:
    """Whether a product of this size can be cut so."""
    whole = width % (32 * shape.warps) == 0 and columns % ((8 if gated else 16) * shape.blocks) == 0
    if not whole or (gated and shape.blocks % 2):
        return False
    return max(shape.depth, shape.x_depth) <= width // (32 * shape.warps)


def shape_for(columns: int, width: int, rows: int, gated: bool) -> Shape:
    """The shape that was measured, here (``kernel_table``) or ahead, else one that any product can
    be computed with."""
    groups = -(-rows // 8)
    here = chosen("gated_few_rows" if gated else "few_rows", columns, width, 8 * groups)
    if here is not None and takes(Shape(*here), columns, width, gated):
        return Shape(*here)
    found = (GATED_SHAPES if gated else SHAPES).get((columns, width, groups))
    if found is not None:
        return found
    warps = 8 if width % 256 == 0 else 4
    steps = width // (32 * warps)
    blocks = 2 if gated else 1
    return Shape(blocks, warps, min(steps, 8 // blocks), min(steps, 4))


def few_rows_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
    shape: Shape | None = None,
) -> None:
    """x: [R, K]; weight: [N, K], or [2 N, K] if ``gated``; bias: as many as the weight's rows;
    norm_weight: [K]; out: [R, N], not x itself; all contiguous. See ``fits``. One program holds all
    R rows in registers: meant for up to 32.
    """
    rows, width = x.shape
    columns = out.shape[1]
    blocks, warps, depth, x_depth = shape or shape_for(columns, width, rows, gated)
    _few_rows_kernel[(columns // ((8 if gated else 16) * blocks),)](
        x, weight, bias, norm_weight, out, eps, rows, columns, width, -(-rows // 8), blocks, warps,
        depth, x_depth, norm_weight is not None, gated, bias is not None, add, EARLY,
        num_warps=warps, launch_pdl=EARLY,
    )  # fmt: skip
