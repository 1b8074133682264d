"""RMSNorm on the GPU, alone, and after adding to the residual stream what may be normed itself.

    y = x / sqrt(mean(x²) + eps) * weight           reference: ``penstock.kernels.rms_norm``

One program a row; the row stays in registers between the sum and the product, so x is read once
and y written once; the weight is read before the kernel ahead has ended (``early_launch``). Bound
by bandwidth: 2 (``rms_norm``) or 4 (``add_rms_norm``) rows moved.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.added_rows import AddedRows, with_added
from penstock.kernels.gpu.device_functions import rms_normed, rms_scale
from penstock.kernels.gpu.early_launch import EARLY, begin_early


@triton.jit
def _rms_norm_kernel(
    x, weight, out, eps, WIDTH: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    value = tl.load(x + row * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
    result = rms_normed(value, factor, eps, WIDTH)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_and_norm(value, factor, residual, out, at, inside, eps, WIDTH: tl.constexpr):
    """Add a row in fp32 to ``residual``, rounded to its type, and norm that sum into ``out``; at:
    where the row's values are."""
    value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    store_and_norm(value, factor, residual, out, at, inside, eps, WIDTH)


@triton.jit
def store_and_norm(value, factor, residual, out, at, inside, eps, WIDTH: tl.constexpr):
    """Write a row in fp32 to ``residual``, rounded to its type, and norm that into ``out``."""
    rounded = value.to(residual.dtype.element_ty)
    tl.store(residual + at, rounded, mask=inside)
    value = rounded.to(tl.float32)
    scale = rms_scale(tl.sum(value * value, 0), eps, WIDTH)
    tl.store(out + at, (value * scale * factor).to(out.dtype.element_ty), mask=inside)


@triton.jit
def sum_of_parts(x, at, inside, stride, PARTS: tl.constexpr):
    """A row of the sum of ``PARTS`` arrays that lie ``stride`` apart, fp32; at: its places in the
    first."""
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        value += tl.load(x + part * stride + at, mask=inside, other=0.0).to(tl.float32)
    return value


@triton.jit(do_not_specialize=["rows"])
def _add_normed_kernel(
    x, x_weight, residual, weight, out, eps, rows, more, adapters,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    x_factor = tl.load(x_weight + column, mask=inside, other=0.0).to(tl.float32)
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    at = row * WIDTH + column
    value = sum_of_parts(x, at, inside, rows * WIDTH, PARTS)
    value = with_added(value, more, adapters, row, at, inside)
    value = rms_normed(value, x_factor, eps, WIDTH).to(residual.dtype.element_ty)
    _add_and_norm(value.to(tl.float32), factor, residual, out, at, inside, eps, WIDTH)


@triton.jit(do_not_specialize=["rows"])
def _add_rms_norm_kernel(
    x, residual, weight, out, eps, rows, more, adapters,
    WIDTH: tl.constexpr, PADDED: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, PADDED)
    inside = column < WIDTH
    factor = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    begin_early(EARLY)
    at = row * WIDTH + column
    value = sum_of_parts(x, at, inside, rows * WIDTH, PARTS)
    value = with_added(value, more, adapters, row, at, inside)
    _add_and_norm(value, factor, residual, out, at, inside, eps, WIDTH)


def _warps(width: int) -> int:
    return min(16, max(4, triton.next_power_of_2(width) // 512))


def rms_norm(x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, out: [N, D] of one type, contiguous; weight: [D]."""
    rows, width = out.shape
    if rows:
        _rms_norm_kernel[(rows,)](
            x, weight, out, eps, width, triton.next_power_of_2(width), EARLY,
            num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip


def add_normed(
    x: Tensor,
    x_weight: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    added: AddedRows | None = None,
) -> None:
    """``residual += rms_norm(x, x_weight)``, both rounded to its type, then out =
    rms_norm(residual, weight). x: [N, D], or [P, N, D], parts whose sum is it; residual, out:
    [N, D]; all contiguous; weights: [D]; added: to x."""
    rows, width = residual.shape
    if rows:
        _add_normed_kernel[(rows,)](
            x, x_weight, residual, weight, out, eps, rows, *(added or (None, None)), width,
            triton.next_power_of_2(width), len(x) if x.ndim == 3 else 1, EARLY,
            num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    added: AddedRows | None = None,
) -> None:
    """``residual += x``, rounded to its type, then out = rms_norm(residual).

    x: [N, D], or [P, N, D], parts whose sum is it; residual, out: [N, D]; all contiguous; weight:
    [D]; added: to x.
    """
    rows, width = residual.shape
    if rows:
        _add_rms_norm_kernel[(rows,)](
            x, residual, weight, out, eps, rows, *(added or (None, None)), width,
            triton.next_power_of_2(width), len(x) if x.ndim == 3 else 1, EARLY,
            num_warps=_warps(width), launch_pdl=EARLY,
        )  # fmt: skip
