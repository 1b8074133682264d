"""What a second training changed, as a byte a weight: small enough to be carried beside the first.

A matrix W that was W0 becomes W0 + c s with whole numbers c of -127 to 127 and a scale s for each
row, a hundred and twenty-seventh of the row's largest change; other weights stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

MOST = 127
_LEAST_SCALE = 1e-12 / MOST
"""Of a row that did not change."""


def rounded(change: Tensor) -> Tensor:
    """change: [rows, columns], fp32. Returns what its codes and scales stand for."""
    scale = (change.abs().amax(1, keepdim=True) / MOST).clamp(min=_LEAST_SCALE)
    return (change / scale).round() * scale


def round_changes(model: nn.Module, start: Mapping[str, Tensor]) -> None:
    """Round, in place, what distinguishes a model from the weights that its training began with.

    start: by the names of ``state_dict``. Raises ``KeyError`` for one that is missing.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.ndim == 2:
                old = start[name].float()
                weight.copy_(old + rounded(weight.detach().float().cpu() - old))
