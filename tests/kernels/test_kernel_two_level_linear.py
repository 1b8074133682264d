"""int8 weights times activations in two levels of seven bits."""

from __future__ import annotations

import pytest
import torch

from penstock.kernels import two_level_linear
from penstock.kernels.quantized_weight import QuantizedWeight, quantized
from penstock.kernels.two_level_linear import (
    TwoLevelWeight,
    two_level_product,
    two_level_weight,
)

WEIGHT = quantized(torch.randn(80, 192, generator=torch.Generator().manual_seed(0)), "int8")


@pytest.fixture(scope="module")
def packed() -> TwoLevelWeight:
    found = two_level_weight(WEIGHT)
    if found is None:
        pytest.skip("this processor or torch has no such product")
    return found


def error(found: torch.Tensor, x: torch.Tensor, weight: QuantizedWeight) -> float:
    wanted = x.double() @ weight.dequantized(torch.float64).t()
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("rows", [1, 2, 9, 300])
def test_a_product_is_nearer_than_bf16_would_be(rows: int, packed: TwoLevelWeight) -> None:
    x = torch.randn(rows, 192, generator=torch.Generator().manual_seed(rows))
    found = two_level_product(x, packed)
    assert found.dtype == torch.float32 and error(found, x, WEIGHT) < 2e-4
    assert error(two_level_product(x.bfloat16(), packed), x.bfloat16().float(), WEIGHT) < 4e-3


def test_codes_of_every_size_are_multiplied_exactly() -> None:
    """The largest ones too, whose pairs fill 16 bits."""
    codes = torch.full((16, 64), -128, dtype=torch.int8)
    codes[1] = 127
    found = two_level_weight(QuantizedWeight("int8", codes, 64))
    if found is None:
        pytest.skip("this processor or torch has no such product")
    x = torch.full((1, 64), -2.5)
    assert two_level_product(x, found)[0, :2].tolist() == [64 * 128 * 2.5, -64 * 127 * 2.5]


def test_a_rows_bits_are_its_own_in_any_company(packed: TwoLevelWeight) -> None:
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(1))
    x[7], x[8] = 1e6, 0.0
    whole = two_level_product(x, packed)
    for row in (0, 8, 39):
        assert torch.equal(two_level_product(x[row : row + 1], packed)[0], whole[row])
    x[9], x[10, 3] = torch.nan, torch.inf
    with_bad = two_level_product(x, packed)
    assert torch.equal(with_bad[11:], whole[11:])
    assert not whole[8].any()
    assert bool(with_bad[9].isnan().all()) and not bool(with_bad[10].isfinite().any())


def test_inputs_may_be_in_an_order(packed: TwoLevelWeight) -> None:
    order = torch.randperm(192, generator=torch.Generator().manual_seed(2))
    weight = WEIGHT._replace(order=order)
    found = two_level_weight(weight)
    x = torch.randn(3, 192, generator=torch.Generator().manual_seed(3))
    assert found is not None and error(two_level_product(x, found), x, weight) < 2e-4


def test_other_weights_are_left_to_other_products() -> None:
    groups = WEIGHT._replace(group=64, scales=torch.ones(3, 80))
    assert two_level_weight(groups) is None
    assert two_level_weight(quantized(torch.ones(16, 64), "int4", 32)) is None


def test_where_torch_has_it_no_more_the_answer_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(codes: torch.Tensor, factor: torch.Tensor) -> None:
        raise AttributeError("linear_prepack")

    monkeypatch.setattr(two_level_linear, "_handle", gone)
    assert two_level_weight(WEIGHT) is None


def test_a_library_that_computes_something_else_is_not_used(
    packed: TwoLevelWeight, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = two_level_weight(WEIGHT._replace(codes=-WEIGHT.codes))
    assert other is not None
    monkeypatch.setattr(two_level_linear, "_handle", lambda codes, factor: other.handle)
    assert two_level_weight(WEIGHT) is None
