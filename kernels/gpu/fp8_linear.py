"""FP8 products on tensor cores: out = (x Wᵀ) * x_scale * w_scale + b, both operands in e4m3.

Each row of x is quantized by itself: its largest number becomes the largest of e4m3. Products of
rows and columns with a scale each are cuBLASLt's or CUTLASS's (``torch._scaled_mm``), those with
scales of blocks a kernel's here: sums of 128 columns are scaled and added up in fp32, since the
matrix unit of Hopper adds FP8 products in about 14 bits (DeepSeek-V3, section 3.3.2).

Compute capability 8.9 and newer. References: ``quantize_rows_reference`` and
``penstock.kernels.linear`` of what codes and scales stand for.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import INTERPRETED, banded_tile
from penstock.kernels.gpu.early_launch import EARLY, begin_early

MOST = 448.0
"""The largest number of e4m3."""
_LEAST = 1e-12
"""A row of smaller numbers has this scale."""
BLOCK = 128
"""Columns that share a scale of x where weights have scales of blocks."""
CODES = torch.float8_e4m3fn


@triton.jit
def fp8_codes(value):
    """fp32, at most 448, as e4m3, rounded to nearest even."""
    return value.to(tl.float8e4nv)


@triton.jit
def scale_of(value, AXIS: tl.constexpr):
    """The scale of numbers in fp32 along ``AXIS``."""
    return tl.maximum(tl.max(tl.abs(value), AXIS) / 448.0, 1e-12)


@triton.jit
def _quantize_rows_kernel(
    x, codes, scales, x_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(value, 0)
    tl.store(codes + row * WIDTH + column, fp8_codes(value / scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _quantize_blocks_kernel(
    x, codes, scales, x_stride,
    BLOCKS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)[:, None]
    inside = block < BLOCKS
    column = block * 128 + tl.arange(0, 128)[None, :]
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = scale_of(value, 1)[:, None]
    tl.store(codes + row * BLOCKS * 128 + column, fp8_codes(value / scale), mask=inside)
    tl.store(scales + row * BLOCKS + block, scale, mask=inside)


def quantize_rows(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """x: [R, K], any distance between rows; codes: e4m3 [R, K]; scales: fp32 [R, 1], or
    [R, K / 128] for one scale of each block; both contiguous, overwritten."""
    rows, width = x.shape
    if not rows:
        return
    warps = min(16, max(4, triton.next_power_of_2(width) // 1024))
    if scales.shape[1] > 1 or width == BLOCK:
        blocks = width // BLOCK
        _quantize_blocks_kernel[(rows,)](
            x, codes, scales, x.stride(0), blocks, triton.next_power_of_2(blocks), EARLY,
            num_warps=warps, launch_pdl=EARLY,
        )  # fmt: skip
        return
    _quantize_rows_kernel[(rows,)](
        x, codes, scales, x.stride(0), width, triton.next_power_of_2(width), EARLY,
        num_warps=warps, launch_pdl=EARLY,
    )  # fmt: skip


def quantize_rows_reference(x: Tensor, columns: int = 0) -> tuple[Tensor, Tensor]:
    """Codes and scales of x; columns: that share a scale, 0: all of a row."""
    rows, width = x.shape
    parts = x.float().view(rows, -1, columns or width)
    scales = (parts.abs().amax(2) / MOST).clamp_min(_LEAST)
    return (parts / scales[:, :, None]).view(rows, width).to(CODES), scales


def fp8_linear(
    codes: Tensor, scales: Tensor, weight: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor,
    *, fast: bool = True,
) -> None:  # fmt: skip
    """codes: e4m3 [R, K], scales: fp32 [R, 1]; weight: e4m3 [N, K], factor: fp32 [N]; bias, out:
    bf16 [N] and [R, N], all contiguous; K and N multiples of 16. fast: whether sums stay in the
    matrix unit for all of the width."""
    torch._scaled_mm(
        codes, weight.t(), scales, factor[None, :], bias, out_dtype=out.dtype, use_fast_accum=fast,
        out=out,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _block_kernel(
    x, x_scales, weight, scales, bias, out, rows, columns, out_stride,
    WIDTH: tl.constexpr, SCALE_ROWS: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr, BAND: tl.constexpr, SPLITS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_ROWS, BLOCK_COLUMNS] of ``out`` a program; ``BAND`` tiles of rows of x with one
    tile of W before the next one's turn."""
    begin_early(EARLY)
    row, column = banded_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, BAND)
    blocks: tl.constexpr = WIDTH // 128 // SPLITS
    split = tl.program_id(1)
    near = split * blocks * 128 + tl.arange(0, 128)
    left_source = x + row.to(tl.int64)[:, None] * WIDTH + near[None, :]
    right_source = weight + column.to(tl.int64)[None, :] * WIDTH + near[:, None]
    shown, live = column < columns, row < rows
    scale_columns = tl.cdiv(columns, SCALE_ROWS)
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for block in range(blocks):
        left = tl.load(left_source + block * 128, mask=live[:, None], other=0.0)
        right = tl.load(right_source + block * 128, mask=shown[None, :], other=0.0)
        here = split * blocks + block
        x_scale = tl.load(x_scales + row * (WIDTH // 128) + here, mask=live, other=0.0)
        scale = tl.load(scales + here * scale_columns + column // SCALE_ROWS, mask=shown, other=0.0)
        if INTERPRETED:
            product = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
        else:
            product = tl.dot(left, right)
        total += product * x_scale[:, None] * scale.to(tl.float32)[None, :]
    if BIAS:
        added = tl.load(bias + column, mask=shown & (split == 0), other=0.0).to(tl.float32)
        total += added[None, :]
    line = split * rows + row
    target = out + line.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=live[:, None] & shown[None, :])


def fp8_block_linear(
    codes: Tensor, scales: Tensor, weight: Tensor, weight_scales: Tensor, rows: int,
    bias: Tensor | None, out: Tensor, *, tile: tuple[int, int] = (64, 128), warps: int = 4,
    stages: int = 3, splits: int = 1,
) -> None:  # fmt: skip
    """codes: e4m3 [R, K], scales: fp32 [R, K / 128]; weight: e4m3 [N, K], weight_scales: [K / 128,
    ceil(N / rows)]; out: [R, N], or with ``splits`` above 1 [splits, R, N] in fp32, whose sum is
    the product. tile: rows and columns of out of a program."""
    count, columns = len(codes), len(weight)
    programs = -(-count // tile[0]) * -(-columns // tile[1])
    _block_kernel[(programs, splits)](
        codes, scales, weight, weight_scales, bias, out, count, columns, out.stride(-2),
        weight.shape[1], rows, bias is not None, *tile, 8, splits, EARLY,
        num_warps=warps, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
