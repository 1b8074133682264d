"""Layer normalization: y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.

Source: Ba, Kiros, Hinton, "Layer Normalization" (2016).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import layer_norm as torch_layer_norm


def layer_norm_fp32(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize the last dimension of ``x``, not rounded to the type of ``x``.

    x: [..., D] fp32, bf16 or fp16 (any strides); weight, bias: fp32, [D] or what broadcasts to x.
    Returns [..., D] fp32. Every row is computed alone: its bits do not depend on the other rows.
    """
    normed = torch_layer_norm(x.float(), x.shape[-1:], eps=eps).mul_(weight)
    return normed if bias is None else normed.add_(bias)
