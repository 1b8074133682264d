"""int8 products on tensor cores: out = (x Wᵀ) * x_scale * w_scale + b, both operands in int8.

Each row of x is quantized by itself: its largest number becomes 127; the scale of a row with NaN is
NaN, so that its products are. Sums are of whole numbers, in
32 bits: exact. Compute capability 8.0 and newer. References: ``quantize_rows_int8_reference`` and
``penstock.kernels.linear`` of what codes and scales stand for.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_facts import shared_bytes
from penstock.kernels.gpu.device_functions import INTERPRETED, banded_tile
from penstock.kernels.gpu.early_launch import EARLY, begin_early

_LEAST = 1e-12
"""A row of smaller numbers has this scale."""
_STEP, _TILE, _BAND = 128, 128, 8
_MOST_STAGES, _SPARE_BYTES = 4, 2048


@triton.jit
def _quantize_int8_kernel(
    x, codes, scales, x_stride,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    value = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.maximum(tl.max(tl.abs(value), 0) / 127.0, 1e-12)
    broken = tl.max((value != value).to(tl.int32), 0)  # tl.max passes NaN by, and int8 has none
    scale = tl.where(broken > 0, float("nan"), scale)
    # A number this large has no bits for fractions: adding it rounds to nearest even.
    rounded = (value / scale + 12582912.0) - 12582912.0
    tl.store(codes + row * WIDTH + column, rounded.to(tl.int8), mask=inside)
    tl.store(scales + row, scale)


def quantize_rows_int8(x: Tensor, codes: Tensor, scales: Tensor) -> None:
    """x: [R, K], any distance between rows; codes: int8 [R, K]; scales: fp32 [R, 1]; both
    contiguous, overwritten."""
    rows, width = x.shape
    if rows:
        _quantize_int8_kernel[(rows,)](
            x, codes, scales, x.stride(0), width, triton.next_power_of_2(width), EARLY,
            num_warps=min(16, max(4, triton.next_power_of_2(width) // 1024)), launch_pdl=EARLY,
        )  # fmt: skip


def quantize_rows_int8_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of x."""
    wide = x.float()
    scales = (wide.abs().amax(1, keepdim=True) / 127.0).clamp_min(_LEAST)
    return (wide / scales).round().to(torch.int8), scales


@triton.jit(do_not_specialize=["rows"])
def _int8_kernel(
    x, x_scales, weight, factor, bias, out, rows, columns, out_stride,
    WIDTH: tl.constexpr, BIAS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, BAND: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_ROWS, BLOCK_COLUMNS] of ``out`` a program; ``BAND`` tiles of rows of x with one
    tile of W before the next one's turn."""
    begin_early(EARLY)
    row, column = banded_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, BAND)
    near = tl.arange(0, STEP)
    left_source = x + row.to(tl.int64)[:, None] * WIDTH + near[None, :]
    right_source = weight + column.to(tl.int64)[None, :] * WIDTH + near[:, None]
    shown, live = column < columns, row < rows
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.int32)
    for begin in range(0, WIDTH, STEP):
        left = tl.load(left_source + begin, mask=live[:, None], other=0)
        right = tl.load(right_source + begin, mask=shown[None, :], other=0)
        if INTERPRETED:
            # Exact: a sum of 128 products has fewer bits than fp32.
            product = tl.dot(left.to(tl.float32), right.to(tl.float32), input_precision="ieee")
            total += product.to(tl.int32)
        else:
            total = tl.dot(left, right, total, out_dtype=tl.int32)
    result = total.to(tl.float32)
    result *= tl.load(x_scales + row, mask=live, other=0.0)[:, None]
    result *= tl.load(factor + column, mask=shown, other=0.0)[None, :]
    if BIAS:
        result += tl.load(bias + column, mask=shown, other=0.0).to(tl.float32)[None, :]
    target = out + row.to(tl.int64)[:, None] * out_stride + column[None, :]
    tl.store(target, result.to(out.dtype.element_ty), mask=live[:, None] & shown[None, :])


def int8_linear(
    codes: Tensor, scales: Tensor, weight: Tensor, factor: Tensor, bias: Tensor | None, out: Tensor
) -> None:
    """codes: int8 [R, K], scales: fp32 [R, 1]; weight: int8 [N, K], factor: fp32 [N]; bias: [N];
    out: [R, N], any distance between its rows, others contiguous; K a multiple of 128."""
    rows, columns = len(codes), len(weight)
    programs = -(-rows // _TILE) * -(-columns // _TILE)
    stages = min(_MOST_STAGES, (shared_bytes() - _SPARE_BYTES) // (2 * _TILE * _STEP))
    _int8_kernel[(programs,)](
        codes, scales, weight, factor, bias, out, rows, columns, out.stride(0), weight.shape[1],
        bias is not None, _TILE, _TILE, _STEP, _BAND, EARLY,
        num_warps=8, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip
