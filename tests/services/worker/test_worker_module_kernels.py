"""Norms and rotary embedding of modelling code that is not ours are replaced by our kernels where
these give the same."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from support.worker.tiny_models import make_model
from torch import Tensor, nn

from penstock.services.worker.gpu.module_kernels import use_kernels

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
NAME = "apply_rotary_pos_emb"


@pytest.fixture
def models() -> Iterator[Any]:
    """Makes models; their modelling files are what they were afterwards."""
    before: dict[Any, Any] = {}

    def make(variant: str) -> Any:
        model = make_model(variant).to(DEVICE)
        file = sys.modules[type(model).__module__]
        before.setdefault(file, getattr(file, NAME, None))
        return model

    yield make
    for file, function in before.items():
        if function is not None:
            setattr(file, NAME, function)


@pytest.mark.parametrize(
    ("variant", "found"),
    [
        ("qwen3", "9 norms and rotary embedding"),
        ("gemma2", "9 norms and rotary embedding"),
        ("stablelm", "rotary embedding"),
        ("glm4", "9 norms"),
        ("gpt2", ""),
    ],
)
def test_what_is_found_in_a_family_gives_the_same_logits(
    variant: str, found: str, models: Any
) -> None:
    """GLM rotates neighbouring elements of a head; StableLM a part of it, and has layer norms."""
    model = models(variant)
    tokens = torch.arange(7, device=DEVICE)[None]
    with torch.inference_mode():
        wanted = model(input_ids=tokens).logits
        assert use_kernels(model, torch.float32) == found
        assert torch.allclose(model(input_ids=tokens).logits, wanted, 1e-4, 1e-4)
        both = model(input_ids=tokens.expand(2, 7)).logits  # by the code as it was
    assert torch.allclose(both, wanted.expand_as(both), 1e-4, 1e-4)


class OtherRMSNorm(nn.Module):
    """By the sum of squares instead of their mean."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(32))
        self.eps = 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + self.eps)


class OtherEpsRMSNorm(OtherRMSNorm):
    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 2 * self.eps)


def test_a_norm_that_computes_something_else_stays_as_it_is() -> None:
    for norm in (OtherRMSNorm().to(DEVICE), OtherEpsRMSNorm().to(DEVICE)):
        before = norm.forward
        assert use_kernels(norm, torch.float32) == ""
        assert norm.forward == before
