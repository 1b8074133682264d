"""Linear layers in fp32 on tensor cores: y = x Wᵀ + b, each number as the sum of two in bfloat16.

Two of them keep 16 bits of a number. Of the four products of two such sums the three larger ones
are added up in fp32 (Henry, Tang and Heinecke, 2019, "Leveraging the bfloat16 Artificial
Intelligence Datatype For Higher-Precision Computations"), so a product is wrong by 2⁻¹⁶ of itself
at most, where TF32 is by 2⁻¹⁰. The weight is split once, x in registers. Reference:
``split_linear_reference``.
"""

# mypy: disable-error-code="assignment"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_facts import multiprocessors
from penstock.kernels.gpu.device_functions import (
    INTERPRETED,
    banded_tile,
    gelu_tanh_and_mul,
    silu_and_mul,
)

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
_BAND = 8
"""Tiles of rows that take their turn with one tile of the weight."""


class SplitWeight(NamedTuple):
    """[outputs, inputs] bfloat16 each, contiguous: the weight is their sum."""

    high: Tensor
    low: Tensor


class Tile(NamedTuple):
    """What a program computes, and how."""

    rows: int
    columns: int
    width: int
    """Of x and the weight, at a time."""
    warps: int
    stages: int


def tile_for(rows: int, columns: int) -> Tile:
    """rows: of x; columns: of the weight. The fastest of seventeen for products of encoders on an
    H100, or within a tenth of it; any fits in 99 KB."""
    tiles = triton.cdiv(rows, 64) * triton.cdiv(columns, 64)
    if rows <= 64 or tiles < multiprocessors() // 3:
        return Tile(16, 32, 128, 4, 4)
    if tiles <= 2 * multiprocessors():
        return Tile(64, 64, 64, 4, 3)
    return Tile(64, 64, 32, 4, 5)


def split_weight(weight: Tensor) -> SplitWeight:
    """weight: [outputs, inputs] fp32."""
    high = weight.to(torch.bfloat16)
    return SplitWeight(high, (weight - high).to(torch.bfloat16))


def split_linear_reference(x: Tensor, weight: SplitWeight, bias: Tensor | None) -> Tensor:
    """x: [N, inputs] fp32. Returns [N, outputs] fp32."""
    high, low = (each.float() for each in split_weight(x))
    weight_high, weight_low = weight.high.float().t(), weight.low.float().t()
    product = low @ weight_high + high @ weight_low + high @ weight_high
    return product if bias is None else product + bias


@triton.jit
def dot_of_sums(high, low, other_high, other_low, total):
    """total + (high + low) @ (other_high + other_low) without the product of both low parts."""
    if INTERPRETED:
        high, low = high.to(tl.float32), low.to(tl.float32)
        other_high, other_low = other_high.to(tl.float32), other_low.to(tl.float32)
    total = tl.dot(low, other_high, total)
    total = tl.dot(high, other_low, total)
    return tl.dot(high, other_high, total)


@triton.jit
def activated(value, KIND: tl.constexpr):
    """KIND: one of ``ACTIVATIONS``, or empty."""
    if KIND == "gelu":
        value = 0.5 * value * (1.0 + tl.math.erf(value * 0.7071067811865476))
    elif KIND == "gelu_tanh":
        value = gelu_tanh_and_mul(value, 1.0)
    elif KIND == "silu":
        value = silu_and_mul(value, 1.0)
    elif KIND == "relu":
        value = tl.maximum(value, 0.0)
    return value


@triton.jit(do_not_specialize=["rows"])
def _split_kernel(
    x, high, low, bias, residual, out, rows, columns, width, x_stride,
    EVEN: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, BLOCK_WIDTH: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """A tile [BLOCK_ROWS, BLOCK_COLUMNS] of ``out`` a program."""
    row, column = banded_tile(rows, columns, BLOCK_ROWS, BLOCK_COLUMNS, BAND)
    live, shown = (row < rows)[:, None], (column < columns)[None, :]
    near = tl.arange(0, BLOCK_WIDTH)
    left = row.to(tl.int64)[:, None] * x_stride + near[None, :]
    right = column.to(tl.int64)[None, :] * width + near[:, None]
    total = tl.zeros([BLOCK_ROWS, BLOCK_COLUMNS], tl.float32)
    for start in range(0, width, BLOCK_WIDTH):
        of_x, of_weight = live, shown
        if not EVEN:
            of_x = live & (start + near < width)[None, :]
            of_weight = shown & (start + near < width)[:, None]
        value = tl.load(x + left + start, mask=of_x, other=0.0)
        weight_high = tl.load(high + right + start, mask=of_weight, other=0.0)
        weight_low = tl.load(low + right + start, mask=of_weight, other=0.0)
        value_high = value.to(tl.bfloat16)
        value_low = (value - value_high.to(tl.float32)).to(tl.bfloat16)
        total = dot_of_sums(value_high, value_low, weight_high, weight_low, total)
    if BIAS:
        total += tl.load(bias + column, mask=column < columns, other=0.0)[None, :]
    total = activated(total, ACTIVATION)
    place = row.to(tl.int64)[:, None] * columns + column[None, :]
    if ADD:
        total += tl.load(residual + place, mask=live & shown, other=0.0)
    tl.store(out + place, total, mask=live & shown)


def split_linear(
    x: Tensor,
    weight: SplitWeight,
    bias: Tensor | None,
    residual: Tensor | None = None,
    activation: str = "",
    tile: Tile | None = None,
) -> Tensor:
    """x: [N, inputs] fp32, the numbers of a row contiguous; bias: [outputs] fp32; activation: of
    the product and the bias; residual: [N, outputs] fp32, contiguous, which is added behind it.
    Returns [N, outputs] fp32."""
    rows, (columns, width) = len(x), weight.high.shape
    out = x.new_empty(rows, columns)
    tile = tile or tile_for(rows, columns)
    tiles = triton.cdiv(rows, tile.rows) * triton.cdiv(columns, tile.columns)
    if tiles:
        _split_kernel[(tiles,)](
            x, *weight, out if bias is None else bias, out if residual is None else residual, out,
            rows, columns, width, x.stride(0), width % tile.width == 0, bias is not None,
            residual is not None, activation, tile.rows, tile.columns, tile.width, _BAND,
            num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
    return out
