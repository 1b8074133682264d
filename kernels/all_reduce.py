"""Sums over the ranks that share a layer, alone, and with the residual stream and the norm behind.

    out = x₀ + x₁ + … + xₙ₋₁
    residual += that sum, then out = rms_norm(residual, weight)
    residual += rms_norm(that sum, x_weight), then the same

All in fp32, in the order of the ranks: so the bits are the same on all of them, and those of a row
do not depend on where in the tensor it lies, as they do where every rank begins with another part.
The kernel for GPUs is ``penstock.kernels.gpu.all_reduce``.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from penstock.kernels.rms_norm import rms_norm, rms_norm_fp32, scaled_norm_weight


def all_reduce(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """Write the sum of the ranks' ``parts``, each [..., D], to ``out`` of that shape, rounded to
    its type, and return it."""
    return out.copy_(_in_order(parts))


def all_reduce_add_norm(
    parts: Sequence[Tensor],
    residual: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    x_weight: Tensor | None = None,
) -> None:
    """Add the sum of the ranks' ``parts``, each [N, D], to ``residual`` [N, D], rounded to its
    type, and norm that into ``out`` [N, D]. weight: [D]; x_weight: [D], of a norm of the sum, which
    is rounded too."""
    total = _in_order(parts)
    if x_weight is not None:
        total = rms_norm_fp32(total, scaled_norm_weight(x_weight), eps).to(residual.dtype).float()
    residual.copy_(residual.float() + total)
    out.copy_(rms_norm(residual, scaled_norm_weight(weight), eps))


def _in_order(parts: Sequence[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total
