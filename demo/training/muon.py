"""The optimizer of the hidden matrices: Muon (Jordan et al. 2024), matrices of a shape together.

Momentum made orthogonal by five Newton-Schulz iterations, scaled so that AdamW's learning rates
fit (Liu et al. 2025, "Muon is scalable for LLM training").
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

_A, _B, _C = 3.4445, -4.7750, 2.0315


def orthogonal(matrices: Tensor) -> Tensor:
    """[n, rows, columns] to about the nearest orthogonal matrices, in bfloat16."""
    x = matrices.bfloat16()
    turned = x.shape[1] > x.shape[2]
    if turned:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = _A * x + (_B * gram + _C * gram @ gram) @ x
    found: Tensor = x.mT if turned else x
    return found


class Muon(torch.optim.Optimizer):
    """For parameters of two dimensions."""

    def __init__(
        self, parameters: Iterable[Tensor], lr: float, momentum: float, weight_decay: float
    ) -> None:
        groups: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            groups.setdefault(parameter.shape, []).append(parameter)
        listed: list[dict[str, Any]] = [{"params": group} for group in groups.values()]
        super().__init__(listed, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            parameters = group["params"]
            gradients = torch.stack([parameter.grad for parameter in parameters])
            state = self.state[parameters[0]]
            if not state:
                state["momentum"] = torch.zeros_like(gradients)
            state["momentum"].lerp_(gradients, 1 - group["momentum"])
            update = orthogonal(gradients.lerp(state["momentum"], group["momentum"]))
            scale = 0.2 * max(update.shape[1:]) ** 0.5 * group["lr"]
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            torch._foreach_add_(parameters, list(update.float().unbind()), alpha=-scale)
