"""activation(gate) * up on the GPU. Reference: ``penstock.kernels.activation``.

Reads 2 I and writes I values a row; bound by bandwidth.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.added_rows import AddedRows, with_added
from penstock.kernels.gpu.device_functions import gelu_tanh_and_mul, silu_and_mul
from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 1024


@triton.jit
def _gated_product_kernel(
    gate_up, out, more, adapters,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    at = row * 2 * WIDTH + column
    gate = tl.load(gate_up + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + at + WIDTH, mask=inside, other=0.0).to(tl.float32)
    gate = with_added(gate, more, adapters, row, at, inside)
    up = with_added(up, more, adapters, row, at + WIDTH, inside)
    result = gelu_tanh_and_mul(gate, up) if GELU else silu_and_mul(gate, up)
    tl.store(out + row * WIDTH + column, result.to(out.dtype.element_ty), mask=inside)


def gated_product(
    gate_up: Tensor, out: Tensor, activation: str = "silu", added: AddedRows | None = None
) -> None:
    """gate_up: [N, 2 * I] contiguous, gate first; out: [N, I] contiguous, of the same type;
    activation: silu or gelu_tanh; added: to gate_up."""
    rows, width = out.shape
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _gated_product_kernel[grid](
            gate_up, out, *(added or (None, None)), width, _BLOCK,
            activation == "gelu_tanh", EARLY, num_warps=4, launch_pdl=EARLY,
        )  # fmt: skip
