"""RMSNorm.

    y = x / sqrt(mean(x², last dim) + eps) * weight
      = x / sqrt(sum(x²) + D * eps) * (weight * sqrt(D))

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), equation 4. The second
form is what is computed: its factor of the weight is applied once, when the model is loaded, and
the norm of a row is one operation. All is fp32 until the result is rounded.
"""

from __future__ import annotations

import torch
from torch import Tensor


def scaled_norm_weight(weight: Tensor) -> Tensor:
    """``weight * sqrt(D)`` in fp32, as ``rms_norm`` takes it. weight: [..., D]."""
    root: float = weight.shape[-1] ** 0.5
    return weight.float() * root


def rms_norm_fp32(x: Tensor, scaled_weight: Tensor, eps: float) -> Tensor:
    """Normalize the last dimension of ``x``, not rounded to the type of ``x``.

    x: [..., D] fp32, bf16 or fp16 (any strides); scaled_weight: fp32, [D] or what broadcasts to x,
    from ``scaled_norm_weight``. Returns [..., D] fp32. Every row is computed alone: its bits do
    not depend on the other rows.
    """
    wide = x.float()
    norm: Tensor = torch.linalg.vector_norm(wide, 2, -1, True)
    norm.mul_(norm).add_(eps * x.shape[-1]).sqrt_()
    normed: Tensor = wide / norm if wide is x else wide.div_(norm)
    return normed.mul_(scaled_weight)


def rms_norm(x: Tensor, scaled_weight: Tensor, eps: float) -> Tensor:
    """``rms_norm_fp32`` in the type of ``x``."""
    return rms_norm_fp32(x, scaled_weight, eps).to(x.dtype)
