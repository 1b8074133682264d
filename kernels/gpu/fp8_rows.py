"""Norms and gates whose rows go on in FP8: what stands ahead of products in FP8 (``fp8_linear``).

The kernels of ``norm`` and ``activation``, which quantize a row where they have it in registers:
a row is written in a byte a number, with its scale, and read again by nobody. Results are those of
``norm`` and ``activation`` ahead of ``fp8_linear.quantize_rows_reference``, but that nothing is
rounded between the two. Compute capability 8.9 and newer.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import (
    gelu_tanh_and_mul,
    rms_normed,
    rms_scale,
    silu_and_mul,
)
from penstock.kernels.gpu.early_launch import EARLY, begin_early
from penstock.kernels.gpu.fp8_linear import CODES, fp8_codes, quantize_rows, scale_of
from penstock.kernels.gpu.norm import sum_of_parts


class Fp8Rows(NamedTuple):
    """Rows in FP8: a number is its code times the scale of its row."""

    codes: Tensor
    """e4m3 [R, K], contiguous."""
    scales: Tensor
    """fp32 [R, 1], contiguous."""

    def first(self, rows: int) -> Fp8Rows:
        return Fp8Rows(self.codes[:rows], self.scales[:rows])


def fp8_rows_in(memory: Tensor, width: int) -> Fp8Rows:
    """As many rows of ``width`` as ``memory``, [R, N] contiguous, has, in its memory: N numbers
    must have more than ``width`` + 4 bytes, and width be a multiple of 4."""
    rows = len(memory)
    flat = memory.view(torch.uint8).view(-1)
    if rows * (width + 4) > len(flat) or width % 4:
        raise ValueError(f"{rows} rows of {width} codes have no room in {list(memory.shape)}")
    scales = flat[rows * width : rows * (width + 4)].view(torch.float32)
    return Fp8Rows(flat[: rows * width].view(CODES).view(rows, width), scales.view(rows, 1))


@triton.jit
def _write_row(value, codes, scales, row, column, inside, WIDTH: tl.constexpr):
    """value: fp32, zeros where it is not ``inside``."""
    scale = scale_of(value, 0)
    tl.store(codes + row * WIDTH + column, fp8_codes(value / scale), mask=inside)
    tl.store(scales + row, scale)


@triton.jit
def _rms_norm_fp8_kernel(
    x, weight, codes, scales, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    normed = rms_normed(value, factor, eps, WIDTH)
    _write_row(normed, codes, scales, row, column, inside, WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_fp8_kernel(
    x, residual, weight, codes, scales, eps, rows,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    at = row * WIDTH + column
    value = sum_of_parts(x, at, inside, rows * WIDTH, PARTS)
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = rms_scale(tl.sum(value * value, 0), eps, WIDTH)
    _write_row(value * scale * factor, codes, scales, row, column, inside, WIDTH)


@triton.jit
def _gated_fp8_kernel(
    gate_up, codes, scales,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    source = gate_up + row * 2 * WIDTH + column
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + WIDTH, mask=inside, other=0.0).to(tl.float32)
    result = gelu_tanh_and_mul(gate, up) if GELU else silu_and_mul(gate, up)
    _write_row(result, codes, scales, row, column, inside, WIDTH)


def _warps(width: int) -> int:
    return min(16, max(4, triton.next_power_of_2(width) // 512))


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, out: Fp8Rows) -> None:
    """x: [R, K] contiguous; weight: [K]."""
    rows, width = x.shape
    if rows:
        _rms_norm_fp8_kernel[(rows,)](
            x, weight, *out, eps, width, triton.next_power_of_2(width), EARLY,
            num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float, out: Fp8Rows) -> None:
    """``residual += x``, rounded to its type, then its norm to ``out``; see ``add_rms_norm``."""
    rows, width = residual.shape
    if rows:
        _add_rms_norm_fp8_kernel[(rows,)](
            x, residual, weight, *out, eps, rows, width, triton.next_power_of_2(width),
            len(x) if x.ndim == 3 else 1, EARLY, num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip


def gated_fp8(gate_up: Tensor, out: Fp8Rows, activation: str = "silu") -> None:
    """gate_up: [R, 2 K] contiguous, gate first; activation: silu or gelu_tanh."""
    rows, width = out.codes.shape
    if rows:
        _gated_fp8_kernel[(rows,)](
            gate_up, *out, width, triton.next_power_of_2(width), activation == "gelu_tanh", EARLY,
            num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip


def rows_to_fp8(x: Tensor, out: Fp8Rows) -> None:
    """x: [R, K], any distance between its rows."""
    quantize_rows(x, *out)
