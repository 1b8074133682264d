"""Tail-free sampling of rows on the device: the one sampler that needs a row in order.

The rule is that of ``penstock.kernels.sampling.samplers.tail_free``. A few rows are sorted at once,
so that little memory is taken for it.
"""

from __future__ import annotations

import torch
from torch import Tensor

_AT_ONCE = 8
"""Rows."""


def tail_free_rows(adjusted: Tensor, rows: Tensor, shares: Tensor) -> None:
    """Drop what tail-free sampling drops, in place. Waits for nothing.

    adjusted: [N, V] fp32; rows: [n] int64, which of them; shares: [n] fp32.
    """
    for first in range(0, len(rows), _AT_ONCE):
        part = rows[first : first + _AT_ONCE]
        z = adjusted.index_select(0, part)
        floor = _floors(z, shares[first : first + _AT_ONCE, None])
        adjusted.index_copy_(0, part, z.masked_fill_(z < floor, -torch.inf))


def _floors(z: Tensor, shares: Tensor) -> Tensor:
    """The lowest logit that each row keeps, [n, 1]; -inf: all."""
    vocab = z.shape[1]
    ordered = z.sort(dim=-1, descending=True).values
    p = ordered.double().softmax(-1)
    curve = p.diff(n=2).abs_()
    if vocab < 3:
        return torch.full_like(shares, -torch.inf)
    total = curve.sum(-1, keepdim=True)
    inside = curve.cumsum_(-1) <= shares * total
    kept = inside.sum(-1, keepdim=True).clamp_(max=vocab - 2)
    floor = ordered.gather(1, kept)
    return floor.masked_fill_(total <= 0.0, -torch.inf)
