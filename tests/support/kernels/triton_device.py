"""Where Triton kernels run in tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import torch

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
DTYPES = [torch.bfloat16, torch.float16, torch.float32] if ON_GPU else [torch.float32]
"""The interpreter truncates when it rounds to bf16."""


def error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """‖found - wanted‖ / ‖wanted‖ in fp64."""
    difference = found.double() - wanted.double()
    return float(difference.norm() / wanted.double().norm().clamp_min(1e-30))


def tolerance(dtype: torch.dtype) -> float:
    """Relative error that rounding alone explains."""
    return {torch.bfloat16: 8e-3, torch.float16: 1e-3, torch.float32: 2e-5}[dtype]
