"""A linear layer: what a checkpoint has of it, its products, and its forms."""

from __future__ import annotations

import pytest
import torch

from penstock.services.worker.models.linear import Linear
from penstock.services.worker.models.linear_specification import LinearSpecification

CPU = torch.device("cpu")
FUSED = LinearSpecification(24, (16, 4, 4), ("q", "k", "v"), bias=True)


def random_linear(specification: LinearSpecification, dtype: torch.dtype) -> Linear:
    linear = Linear.allocate(specification, dtype, CPU)
    generator = torch.Generator().manual_seed(0)
    for tensor in linear.named().values():
        tensor.normal_(generator=generator)
    return linear


def test_what_a_checkpoint_has_in_parts_is_one_weight() -> None:
    linear = random_linear(FUSED, torch.float32)
    named = linear.named()
    assert {name: tuple(each.shape) for name, each in named.items()} == FUSED.shapes("")
    assert list(named) == ["q.weight", "k.weight", "v.weight", "q.bias", "k.bias", "v.bias"]
    x = torch.randn(3, 24)
    apart = [torch.nn.functional.linear(x, named[f"{n}.weight"], named[f"{n}.bias"]) for n in "qkv"]
    assert torch.allclose(linear(x), torch.cat(apart, -1), atol=1e-5)
    again = Linear.of(FUSED, {f"at.{name}": each for name, each in named.items()}, "at.")
    assert torch.equal(again.weight, linear.weight)
    assert again.bias is not None and linear.bias is not None
    assert torch.equal(again.bias, linear.bias)


def test_what_a_checkpoint_has_in_one_piece_is_read_whole() -> None:
    one = LinearSpecification(24, (16, 4, 4), ("qkv",), bias=True)
    assert one.shapes("layer.0.") == {"layer.0.qkv.weight": (24, 24), "layer.0.qkv.bias": (24,)}
    assert list(random_linear(one, torch.float32).named()) == ["qkv.weight", "qkv.bias"]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_product_is_that_of_the_formula_packed_or_not(dtype: torch.dtype, bias: bool) -> None:
    linear = random_linear(LinearSpecification(64, (32,), ("o",), bias), dtype)
    x, residual = torch.randn(5, 64).to(dtype), torch.randn(5, 32).to(dtype)
    expected = x.double() @ linear.weight.double().t()
    if linear.bias is not None:
        expected += linear.bias.double()
    most = 1e-4 if dtype == torch.float32 else 0.25
    with torch.inference_mode():
        out = torch.empty(5, 32, dtype=dtype)
        assert linear.apply(x, out) is out
        assert (out - expected).abs().max() < most
        for packed in (False, True):
            if packed:
                linear.pack()
            assert (linear(x) - expected).abs().max() < most
            assert (linear.add_to(residual, x) - residual - expected).abs().max() < 2 * most


def test_results_may_be_multiplied_and_reordered() -> None:
    linear = random_linear(FUSED, torch.float32)
    x, order = torch.randn(3, 24), torch.tensor([2, 0, 1])
    before = linear(x)
    linear.multiply_by(0.5)
    linear.reorder(order)
    assert torch.allclose(linear(x)[:, :3], 0.5 * before[:, order], atol=1e-6)
    assert torch.allclose(linear(x)[:, 3:], 0.5 * before[:, 3:], atol=1e-6)


def test_its_bytes_are_counted_without_memory() -> None:
    specification = LinearSpecification(24, (16, 16), ("gate", "up"), bias=True, gated=True)
    linear = Linear.allocate(specification, torch.bfloat16, torch.device("meta"))
    assert linear.num_bytes == 2 * specification.num_parameters == 2 * 32 * 25
    assert specification.columns == 16
