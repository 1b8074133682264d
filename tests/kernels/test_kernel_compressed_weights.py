"""Weights in 12 bits a number, restored: the same numbers."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from support.kernels.triton_device import DEVICE, ON_GPU

from penstock.kernels.gpu import compressed_weights
from penstock.kernels.gpu.compressed_weights import (
    CAPACITY,
    CannotCompress,
    compress,
    lines_of_blocks,
    restore,
)

KINDS = [(False, 1), (False, 2), (True, 1)]
"""Whether a product is gated, and how many programs share its width."""


def weights(rows: int, width: int) -> torch.Tensor:
    return (torch.randn(rows, width) * 0.02).bfloat16().to(DEVICE)


def exact(weight: torch.Tensor, gated: bool, splits: int) -> bool:
    compressed = compress(weight, gated=gated, splits=splits)
    on_host = type(compressed)(*(part.cpu() for part in compressed))
    restored = restore(on_host, weight.shape[1], gated=gated)
    return torch.equal(restored.view(torch.int64), weight.cpu().double().view(torch.int64))


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize(("gated", "splits"), KINDS)
def test_restored_weights_are_the_same_numbers(gated: bool, splits: int) -> None:
    assert exact(weights(128, 384), gated, splits)


@pytest.mark.parametrize(("gated", "splits"), KINDS)
def test_numbers_that_the_short_form_cannot_hold_are_kept_too(gated: bool, splits: int) -> None:
    weight = weights(128, 256)
    weight[3, 7] = 0.0
    weight[100, 200:202] = torch.tensor([1e-20, -3e-12])
    weight[70, 1] = -1e-39  # subnormal
    weight[5] *= 1e5
    weight[64:, 5] = 0.0
    weight[17] = 0.0
    weight[20, 9] = -0.0
    weight[18, 1] = -3.0
    assert exact(weight, gated, splits)


@pytest.mark.parametrize("spread", [1e-30, 1e-3, 1.0, 1e4])
def test_rows_of_any_magnitude_are_the_same_numbers(spread: float) -> None:
    scale = torch.logspace(-6, 6, 64, device=DEVICE)[:, None] * spread
    assert exact((weights(64, 128).float() * scale).bfloat16(), False, 1)


def test_random_weights_take_three_quarters_of_the_bytes() -> None:
    weight = weights(64, 4096)
    assert 0.75 < compress(weight).num_bytes / weight.nbytes < 0.76


def test_a_weight_with_too_many_small_numbers_is_refused_with_their_number() -> None:
    weight = torch.ones(128, 320, dtype=torch.bfloat16, device=DEVICE)
    weight[70, : CAPACITY - 1] = 0.0
    assert exact(weight, False, 1)
    weight[71, 300] = 0.0
    with pytest.raises(CannotCompress, match=r"^256 numbers in 64 rows .* at most 255 "):
        compress(weight)
    weight[:, ::2] = 0.0
    with pytest.raises(CannotCompress, match=r"^\d{5} numbers and more .* at most 255 "):
        compress(weight)


@pytest.mark.parametrize(
    ("numbers", "reason"),
    [
        ([float("inf"), 1.0], "not finite"),
        ([float("nan"), 1.0], "not finite"),
        ([1e-39, 0.0], "subnormal"),
        ([2.0**100, 2.0**-40], "too different magnitude"),
    ],
    ids=str,
)
def test_numbers_that_would_not_stay_the_same_are_refused(
    numbers: list[float], reason: str
) -> None:
    weight = weights(64, 64)
    weight[30] = 0.0
    weight[30, 40:42] = torch.tensor(numbers)
    with pytest.raises(CannotCompress, match=reason):
        compress(weight)


def test_exceptions_of_weights_of_many_rows_are_all_found(monkeypatch: pytest.MonkeyPatch) -> None:
    most = compressed_weights._ROWS_AT_ONCE
    if not ON_GPU:
        most = 128
        monkeypatch.setattr(compressed_weights, "_ROWS_AT_ONCE", most)
    weight = torch.ones(most + 64, 64, dtype=torch.bfloat16, device=DEVICE)
    weight[most - 1, 3] = weight[most, 5] = weight[-1, -1] = 0.0
    assert exact(weight, False, 1)


def test_blocks_of_gated_products_have_a_gate_row_for_each_up_row() -> None:
    lines = lines_of_blocks(256, gated=True)
    assert torch.equal(lines[:, :32] + 128, lines[:, 32:])
    assert torch.equal(lines.flatten().sort().values, torch.arange(256))
