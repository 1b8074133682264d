"""Memory for decode attention over rows that are divided into splits of their contexts."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.gpu.decode_shapes import LEAST_GROUP, MOST_CODES_SPLITS, splits_for


class DecodeWorkspace(NamedTuple):
    """Memory for the parts of split rows. ``arrived``, counters of rows and of groups of splits, is
    zero between launches."""

    partial: Tensor
    sums: Tensor
    arrived: Tensor


def decode_workspace(
    max_rows: int, heads: int, kv_heads: int, head_dim: int, device: torch.device
) -> DecodeWorkspace:
    """Enough for every number of rows up to ``max_rows``."""
    most = max(
        rows * splits_for(rows, kv_heads, MOST_CODES_SPLITS) for rows in range(1, max_rows + 1)
    )
    return DecodeWorkspace(
        torch.empty(most * heads * head_dim, dtype=torch.float32, device=device),
        torch.empty(2 * most * heads, dtype=torch.float32, device=device),
        torch.zeros(
            max_rows * kv_heads + most * kv_heads // LEAST_GROUP, dtype=torch.int32, device=device
        ),
    )
