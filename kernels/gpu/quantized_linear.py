"""Linear layers with quantized weights on a GPU: out = x Wᵀ + b, activations in the model's type.

Weights are read as codes and widened in registers, so that a product of few rows takes as long as
it takes to read the codes. No tensor core for FP8 or FP4 is asked for: cards without them compute
the same. Reference: ``penstock.kernels.quantized_weight.QuantizedWeight.dequantized``.

Where a tile of columns has one scale for each row of the weight, codes are multiplied as they are
(all are exact in bf16 and fp16) and the tile's sum, in fp32, is scaled: nothing is rounded but x.
Smaller groups, and zeros with them, are applied to the codes ahead of the product. Of codes of four
bits a tile of bytes is two tiles of columns, half the width apart.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import INTERPRETED
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.quantized_weight import INT4_ZERO, QuantizedWeight

_KINDS = {"int8": 0, "int4": 1, "fp8": 2, "fp4": 3}
_FEW_ROWS = 16
_LARGEST_STEP = 64
_LEAST_STEP = 32


class QuantizedConstants(NamedTuple):
    """Those of the kernel, in its order."""

    span: int
    """Codes, or bytes of two codes, of a row of the weight."""
    group: int
    scale_rows: int
    kind: int
    even: bool
    """Whether a tile of columns lies within one group."""
    scaled: bool
    zeros: bool
    e4m3_scales: bool
    factor: bool
    bias: bool
    ordered: bool
    offsets: bool
    block_rows: int
    block_columns: int
    step: int
    early: bool
    zero: int
    """Of int4 without zeros."""


@triton.jit
def _e4m3(bits):
    """uint8 in the format e4m3, as fp32. Its exponent and mantissa are those of a number in fp16
    that is 2⁸ smaller, subnormal ones too."""
    wide = bits.to(tl.uint16)
    halves = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return halves.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def _e2m1(bits):
    """uint8 of which four bits are in the format e2m1, as fp32."""
    exponent = ((bits >> 1) & 3).to(tl.int32)
    mantissa = (bits & 1).to(tl.float32)
    power = (1 << exponent).to(tl.float32) * 0.5
    value = tl.where(exponent == 0, mantissa * 0.5, (1.0 + mantissa * 0.5) * power)
    return tl.where((bits & 8) != 0, -value, value)


@triton.jit
def _widened(codes, HIGH: tl.constexpr, KIND: tl.constexpr, ZERO: tl.constexpr):
    """A tile of codes as fp32; HIGH: of two in a byte, the ones in the high bits."""
    if KIND == 0:
        return codes.to(tl.float32)
    elif KIND == 2:
        return _e4m3(codes)
    else:
        if HIGH:
            half = codes >> 4
        else:
            half = codes & 15
        if KIND == 1:
            return half.to(tl.float32) - ZERO
        else:
            return _e2m1(half)


@triton.jit
def _tile_product(
    total, x, scales, zeros, order, offsets, codes, row, column, k, rows, columns, groups_stride,
    x_stride,
    HIGH: tl.constexpr, SPAN: tl.constexpr, GROUP: tl.constexpr,
    SCALE_ROWS: tl.constexpr, KIND: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr,
    ZEROS: tl.constexpr, E4M3_SCALES: tl.constexpr, ORDERED: tl.constexpr, OFFSETS: tl.constexpr,
    ZERO: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """``total`` plus the product of a tile of x, [rows, STEP], with one of the weight."""
    at = k + (SPAN if HIGH else 0)
    inside = k < SPAN
    if ORDERED:
        source = tl.load(order + at, mask=inside, other=0)
    else:
        source = at
    left = tl.load(
        x + row[:, None].to(tl.int64) * x_stride + source[None, :],
        mask=(row < rows)[:, None] & inside[None, :], other=0.0,
    )  # fmt: skip
    right = _widened(codes, HIGH, KIND, 0 if ZEROS else ZERO)
    shown = column < columns
    scale_column = column // SCALE_ROWS
    if EVEN:
        # The first column stands for all of the tile.
        group = tl.min(at, 0) // GROUP
        if ZEROS:
            zero = tl.load(zeros + group * columns + column, mask=shown, other=0)
            right -= zero.to(tl.float32)[None, :]
    else:
        groups = at // GROUP
        mask = inside[:, None] & shown[None, :]
        if ZEROS:
            place = groups[:, None] * columns + column[None, :]
            right -= tl.load(zeros + place, mask=mask, other=0).to(tl.float32)
        if SCALED:
            place = groups[:, None] * groups_stride + scale_column[None, :]
            scale = tl.load(scales + place, mask=mask, other=0)
            right *= _e4m3(scale) if E4M3_SCALES else scale.to(tl.float32)
        if OFFSETS:
            place = groups[:, None] * columns + column[None, :]
            right += tl.load(offsets + place, mask=mask, other=0.0)
    right = tl.where(inside[:, None], right, 0.0)
    if INTERPRETED:
        product = tl.dot(left.to(tl.float32), right, input_precision="ieee")
    else:
        product = tl.dot(left, right.to(left.dtype), input_precision="ieee")
    if EVEN and SCALED:
        scale = tl.load(scales + group * groups_stride + scale_column, mask=shown, other=0)
        product *= (_e4m3(scale) if E4M3_SCALES else scale.to(tl.float32))[None, :]
    if EVEN and OFFSETS:
        offset = tl.load(offsets + group * columns + column, mask=shown, other=0.0)
        product += tl.sum(left.to(tl.float32), 1)[:, None] * offset[None, :]
    return total + product


@triton.jit(do_not_specialize=["rows"])
def _quantized_kernel(
    x, codes, scales, zeros, factor, order, offsets, bias, out, rows, columns, groups_stride,
    x_stride, out_stride,
    SPAN: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr,
    KIND: tl.constexpr, EVEN: tl.constexpr, SCALED: tl.constexpr, ZEROS: tl.constexpr,
    E4M3_SCALES: tl.constexpr, FACTOR: tl.constexpr, BIAS: tl.constexpr, ORDERED: tl.constexpr,
    OFFSETS: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    STEP: tl.constexpr, EARLY: tl.constexpr, ZERO: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_ROWS, BLOCK_COLUMNS] of ``out`` a program."""
    begin_early(EARLY)
    column = tl.program_id(0) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    shown = column < columns
    source = codes + column[None, :].to(tl.int64) * SPAN
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for begin in range(0, SPAN, STEP):
        k = begin + tl.arange(0, STEP)
        tile = tl.load(source + k[:, None], mask=(k < SPAN)[:, None] & shown[None, :], other=0)
        total = _tile_product(
            total, x, scales, zeros, order, offsets, tile, row, column, k, rows, columns,
            groups_stride, x_stride, False, SPAN, GROUP, SCALE_ROWS, KIND, EVEN, SCALED, ZEROS,
            E4M3_SCALES, ORDERED, OFFSETS, ZERO, STEP,
        )  # fmt: skip
        if KIND == 1 or KIND == 3:
            total = _tile_product(
                total, x, scales, zeros, order, offsets, tile, row, column, k, rows, columns,
                groups_stride, x_stride, True, SPAN, GROUP, SCALE_ROWS, KIND, EVEN, SCALED, ZEROS,
                E4M3_SCALES, ORDERED, OFFSETS, ZERO, STEP,
            )  # fmt: skip
    if FACTOR:
        total *= tl.load(factor + column, mask=shown, other=0.0)[None, :]
    if BIAS:
        total += tl.load(bias + column, mask=shown, other=0.0).to(tl.float32)[None, :]
    target = out + row[:, None].to(tl.int64) * out_stride + column[None, :]
    tl.store(target, total.to(out.dtype.element_ty), mask=(row < rows)[:, None] & shown[None, :])


def quantized_linear(x: Tensor, weight: QuantizedWeight, bias: Tensor | None, out: Tensor) -> None:
    """x: [R, K]; bias: [N]; out: [R, N], any distance between its rows."""
    rows, outputs = len(x), weight.shape[0]
    span = weight.codes.shape[1]
    step = _step(weight.group, span, halves=weight.half_bytes)
    few = rows <= _FEW_ROWS
    scales = weight.scales
    e4m3 = scales is not None and scales.dtype == torch.float8_e4m3fn
    constants = QuantizedConstants(
        span, weight.group, weight.rows, _KINDS[weight.kind], step > 0, scales is not None,
        weight.zeros is not None, e4m3, weight.factor is not None, bias is not None,
        weight.order is not None, weight.offsets is not None, 16 if few else 64,
        64 if few else 128, step or _LEAST_STEP, EARLY, INT4_ZERO,
    )  # fmt: skip
    codes = weight.codes.view(torch.uint8) if weight.kind == "fp8" else weight.codes
    if scales is not None and e4m3:
        scales = scales.view(torch.uint8)
    grid = (-(-outputs // constants.block_columns), -(-rows // constants.block_rows))
    groups_stride = 0 if scales is None else scales.shape[1]
    # A third stage in fp32 is more shared memory than GPUs with 99 KiB of it have.
    stages = 3 if constants.even and x.dtype != torch.float32 else 2
    _quantized_kernel[grid](
        x, codes, scales, weight.zeros, weight.factor, weight.order, weight.offsets, bias, out,
        rows, outputs, groups_stride, x.stride(0), out.stride(0), *constants,
        num_warps=4 if few else 8, num_stages=stages, launch_pdl=EARLY,
    )  # fmt: skip


def _step(group: int, span: int, *, halves: bool) -> int:
    """Columns of a tile that lie in one group, with those half the width apart; 0: too few."""
    within = math.gcd(group, span) if halves and group < 2 * span else group
    step = math.gcd(within, _LARGEST_STEP)
    return step if step >= _LEAST_STEP else 0
