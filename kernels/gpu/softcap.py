"""The soft cap of logits on the GPU: cap * tanh(x / cap), in place.

Reference: ``torch.tanh`` in that formula. Source: the technical report of Gemma 2 (2024). Each
number is read and written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from penstock.kernels.gpu.early_launch import EARLY, begin_early

_BLOCK = 4096


@triton.jit
def _softcap_kernel(x, width, stride, CAP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    begin_early(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(x + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    value = CAP - 2.0 * CAP / (1.0 + tl.exp(2.0 / CAP * value))
    tl.store(x + row * stride + column, value.to(x.dtype.element_ty), mask=inside)


def softcap(x: Tensor, cap: float) -> None:
    """x: [N, V], rows contiguous."""
    rows, width = x.shape
    if rows:
        grid = (rows, triton.cdiv(width, _BLOCK))
        _softcap_kernel[grid](
            x, width, x.stride(0), cap, _BLOCK, EARLY, num_warps=8, launch_pdl=EARLY
        )
