"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

``begin_early`` lets the next kernel start, then waits until all that came before this one is
written. What a kernel loads ahead of it must not be written by any other kernel (weights are not).
Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute
capability 9.0 and newer. The interpreter runs one kernel after the other anyway.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


def available() -> bool:
    """Whether kernels on the current device may start early."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)


EARLY = available()


@triton.jit
def begin_early(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def fetch_to_l2(begin, COUNT: tl.constexpr):
    """Have ``COUNT`` values from each pointer of ``begin`` on brought to the L2 cache.

    Compute capability 9.0 and newer. As many pointers as the program has threads; they, and
    ``COUNT`` values, are multiples of 16 bytes. Source: PTX ISA, ``cp.async.bulk.prefetch``.
    """
    size = tl.full(begin.shape, COUNT * begin.dtype.element_ty.primitive_bitwidth // 8, tl.int32)
    tl.inline_asm_elementwise(
        "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r",
        [begin.to(tl.int64), size], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip
