"""Sums over a row of logits, with the same bits alone as in a batch.

Where the result of a reduction is one number, torch cuts the row among threads and adds up what
they found; of several rows each is summed by one thread (``two_pass_reduction`` in ATen's
``TensorIteratorReduce.cpp``). Measured with a vocabulary of 151,936 and two threads: the logsumexp
of one row has other bits than that of the same row among two. So one row is summed as two on a CPU.
"""

from __future__ import annotations

import torch
from torch import Tensor


def row_sum(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """x: [..., V]. Returns [...] of ``dtype``, or of x's."""
    return _several(x).sum(-1, dtype=dtype)[: x.numel() // x.shape[-1]].view(x.shape[:-1])


def row_logsumexp(x: Tensor) -> Tensor:
    """x: [..., V] of a float type. Returns [...] of that type."""
    return _several(x).logsumexp(-1)[: x.numel() // x.shape[-1]].view(x.shape[:-1])


def _several(x: Tensor) -> Tensor:
    """[R, V]; on a CPU of at least two rows."""
    rows = x.reshape(-1, x.shape[-1])
    return rows.expand(2, -1) if len(rows) == 1 and x.device.type == "cpu" else rows
