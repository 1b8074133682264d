"""Linear layers for one row, with what stands around them: norm before, gate or sum after.

    out = W x + b                                        plain
    out = W rms_norm(x)                                  with ``norm_weight``
    out = SiLU(W_gate x) * (W_up x)                      ``gated``, W = [W_gate; W_up]
    out += W x + b                                       ``add``, the residual stream in place

For one row a product is bound by reading W once. A library product stands between small kernels
that each cost a launch and a round trip of the activations; here the norm is the factor that is
left out of the sum and applied at its end, and nothing but W leaves the caches. Each program
multiplies some rows of W, the first columns of which it reads before the kernel ahead of it has
ended (``early_launch``). For two rows and more, and for narrow weights: ``few_rows_linear``.

References: ``penstock.kernels.linear``, ``rms_norm`` and ``activation``.

bf16 and fp32 only: in fp16 the residual stream times the norm's weight might overflow.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.device_functions import rms_scale, silu_and_mul
from penstock.kernels.gpu.early_launch import EARLY, begin_early


@triton.jit
def _row_kernel(
    x, weight, bias, norm_weight, out, eps, columns,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, PART: tl.constexpr, NORM: tl.constexpr,
    GATED: tl.constexpr, BIAS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """``ROWS`` rows of W a program, read ``PART`` columns at a time."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, PART)
    source = weight + row.to(tl.int64)[:, None] * WIDTH + column[None, :]
    tile = tl.load(source)
    if GATED:
        up = weight + (row + columns).to(tl.int64)[:, None] * WIDTH + column[None, :]
        up_tile = tl.load(up)
    begin_early(EARLY)
    total = tl.zeros([ROWS, PART], tl.float32)
    up_total = tl.zeros([ROWS, PART], tl.float32)
    squares = tl.zeros([PART], tl.float32)
    for start in tl.static_range(0, WIDTH, PART):
        part = tl.load(x + start + column).to(tl.float32)
        if NORM:
            squares += part * part
            part *= tl.load(norm_weight + start + column).to(tl.float32)
        total += tile.to(tl.float32) * part[None, :]
        if GATED:
            up_total += up_tile.to(tl.float32) * part[None, :]
        if start + PART < WIDTH:
            tile = tl.load(source + start + PART)
            if GATED:
                up_tile = tl.load(up + start + PART)
    result = tl.sum(total, 1)
    if NORM:
        scale = rms_scale(tl.sum(squares, 0), eps, WIDTH)
        result *= scale
    if BIAS:
        result += tl.load(bias + row).to(tl.float32)
    if GATED:
        upward = tl.sum(up_total, 1)
        if NORM:
            upward *= scale
        if BIAS:
            upward += tl.load(bias + columns + row).to(tl.float32)
        result = silu_and_mul(result, upward)
    if ADD:
        result += tl.load(out + row).to(tl.float32)
    tl.store(out + row, result.to(out.dtype.element_ty))


def fits(width: int, columns: int) -> bool:
    """Whether the kernels take a weight of [columns, width]."""
    return width % 128 == 0 and columns % 16 == 0


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    *,
    norm_weight: Tensor | None = None,
    eps: float = 0.0,
    gated: bool = False,
    add: bool = False,
) -> None:
    """x: [1, K]; weight: [N, K], or [2 N, K] if ``gated``; bias: as many as the weight's rows;
    norm_weight: [K]; out: [1, N]; all contiguous. See ``fits``.
    """
    _, width = x.shape
    columns = out.shape[1]
    # The fastest of eight shapes on an H200 for the layers of Qwen3-0.6B and Qwen3-8B.
    rows = 4 if gated or columns < 2048 else 8
    part = min(1024, width & -width)
    _row_kernel[(columns // rows,)](
        x, weight, bias, norm_weight, out, eps, columns, width, rows, part,
        norm_weight is not None, gated, bias is not None, add, EARLY,
        num_warps=4, launch_pdl=EARLY,
    )  # fmt: skip
