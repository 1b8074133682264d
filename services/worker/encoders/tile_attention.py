"""Attention of a step's rows by our kernel, where a GPU has it."""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.kernels.gpu.packed_rows import DistanceBias, packed_attention
from penstock.services.worker.encoders.attention import FAR, RelativeBias
from penstock.services.worker.encoders.specification import LayerKind


class TileAttention:
    """A ``RowAttention`` in one launch."""

    def __init__(self, tiles: Tensor, bias: RelativeBias | None = None) -> None:
        """tiles: see ``packed_attention``."""
        self._tiles = tiles
        self._bias = DistanceBias(bias.by_distance(), FAR) if bias is not None else None

    def __call__(
        self, query: Tensor, key: Tensor, value: Tensor, kind: LayerKind, scale: float | None = None
    ) -> Tensor:
        """See ``RowAttention``. Rows behind the last prompt have no meaning."""
        query, key, value = (_heads_together(each) for each in (query, key, value))
        out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        packed_attention(
            query, key, value, self._tiles, out, scale or query.shape[-1] ** -0.5, kind.window,
            self._bias,
        )  # fmt: skip
        return out


def _heads_together(x: Tensor) -> Tensor:
    """The same [N, heads, D], in which a row's heads are contiguous."""
    dim = x.shape[-1]
    return x if x.stride()[1:] == (dim, 1) else x.contiguous()
