"""Where Triton kernels run in tests: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
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


class _InOrder:
    """numpy, with products whose sums go from the first number to the last, whatever the shapes."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def matmul(left: Any, right: Any, dtype: Any) -> Any:
        """[M, K] times [K, N]."""
        return np.stack([(row[:, None] * right).sum(0, dtype) for row in left])


def sum_in_order(patch: pytest.MonkeyPatch) -> None:
    """Let the interpreter sum products in one order, as tensor cores do. Those of numpy are a
    BLAS's, which on some processors sums in another order where there are fewer rows."""
    if not ON_GPU:
        patch.setattr("triton.runtime.interpreter.np", _InOrder())
