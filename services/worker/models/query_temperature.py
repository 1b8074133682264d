"""Queries that modelling code of transformers scales by their positions, as Llama 4's does.

In layers without rotary embedding a query at position p is multiplied by
1 + scale * log(1 + floor((p + 1) / floor_scale)): "Scalable-Softmax Is Superior for Attention"
(Nakanishi 2025). That code counts the positions itself, from the first row on. In a step of many
sequences they are others, so it is switched off there, and done where the positions are known.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class QueryTemperatures:
    """Those of one model, whose modules scale no query any more."""

    def __init__(self, model: Any) -> None:
        """model: of transformers."""
        self._of_layers: dict[int, tuple[float, float]] = {}
        for module in model.modules():
            if getattr(module, "attn_temperature_tuning", False) and not module.use_rope:
                self._of_layers[module.layer_idx] = module.attn_scale, module.floor_scale
                module.attn_temperature_tuning = False

    def scaled(self, layer: int, query: Tensor, positions: Tensor) -> Tensor:
        """query: [N, Hq, D]; positions: [N]."""
        if layer not in self._of_layers:
            return query
        scale, floor_scale = self._of_layers[layer]
        factors = torch.log1p(torch.floor((positions.float() + 1.0) / floor_scale)) * scale + 1.0
        return (query * factors[:, None, None]).to(query.dtype)
