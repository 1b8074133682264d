"""Whether Triton works on a device: tried once, with one small kernel.

It is missing from some installations, fails with drivers that are older than it, and needs a
compiler on the machine for what it makes at its first launch.
"""

from __future__ import annotations

import functools

import torch

from penstock.services.worker.gpu.kernel_choice import short

_EPS, _SHAPE = 1e-6, (2, 64)
_TOLERANCE = 1e-3


@functools.cache
def why_no_kernels(device: torch.device) -> str:
    """Why our kernels cannot run on this device; empty if they can."""
    if torch.version.hip is not None:
        return f"the kernels are made for CUDA, and this torch for ROCm {torch.version.hip}"
    try:
        return _try_one(device)
    except Exception as failure:  # of an import, a driver, a compiler or a launch
        return f"Triton does not work here: {short(failure)}"


def _try_one(device: torch.device) -> str:
    from penstock.kernels.gpu.norm import rms_norm

    rows = torch.arange(1, 1 + _SHAPE[0] * _SHAPE[1], dtype=torch.float32).view(_SHAPE)
    wanted = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + _EPS)
    found = torch.empty(_SHAPE, device=device)
    rms_norm(rows.to(device), torch.ones(_SHAPE[1], device=device), _EPS, found)
    if torch.allclose(found.cpu(), wanted, _TOLERANCE, _TOLERANCE):
        return ""
    return "Triton does not work here: a norm that it computes differs from torch's"


def failure_of_triton(failure: Exception) -> str:
    """What Triton raised, in one line; empty for what others did, and where memory is short."""
    text = str(failure)
    own = type(failure).__module__.split(".")[0] == "triton" or "Triton Error" in text
    return short(failure) if own and "out of memory" not in text else ""
