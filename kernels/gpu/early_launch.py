"""Programmatic dependent launch: a kernel starts while the one before it on the stream still runs.

``begin_early`` lets the next kernel start, then waits until all that came before this one is
written. What a kernel loads ahead of it must not be written by any other kernel (weights are not).
Source: CUDA programming guide, "Programmatic Dependent Launch and Synchronization"; compute
capability 9.0 and newer. The interpreter runs one kernel after the other anyway.
"""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.kernels.gpu.device_facts import device_capability


def available() -> bool:
    """Whether kernels on the current device may start early."""
    capability = device_capability()
    return capability is not None and capability >= (9, 0)


EARLY = available()


@triton.jit
def begin_early(EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
