"""Linear layers of numbers in two bfloat16 parts, against a plain computation in fp64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.kernels.triton_device import DEVICE, ON_GPU, error
from torch.nn.functional import gelu, relu, silu

from penstock.kernels.gpu.split_linear import (
    ACTIVATIONS,
    split_linear,
    split_linear_reference,
    split_weight,
    tile_for,
)

SHAPES = [(384, 1536), (768, 768), (3072, 768), (96, 40)] if ON_GPU else [(96, 40)]
ROWS = [1, 16, 33, 200, 513, 2048] if ON_GPU else [3, 33]
TOLERANCE = 3e-5
"""Rounding to two bfloat16 leaves 16 bits; the interpreter, which truncates, leaves 15."""


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_products_are_exact_to_sixteen_bits(rows: int, shape: tuple[int, int]) -> None:
    width, columns = shape
    generator = torch.Generator().manual_seed(rows)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(DEVICE)

    x, weight, bias, residual = (
        rand(rows, width), rand(columns, width) * width**-0.5, rand(columns), rand(rows, columns)
    )  # fmt: skip
    split = split_weight(weight)
    plain = x.double() @ weight.double().t()
    assert error(split_linear(x, split, None), plain) < TOLERANCE
    wanted = plain + bias.double() + residual.double()
    assert error(split_linear(x, split, bias, residual), wanted) < TOLERANCE
    assert error(split_linear_reference(x, split, bias), plain + bias.double()) < TOLERANCE


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_is_done_ahead_of_the_sum(name: str) -> None:
    generator = torch.Generator().manual_seed(1)
    x, weight, residual = (
        torch.randn(*size, generator=generator).to(DEVICE) for size in ((5, 64), (40, 64), (5, 40))
    )
    plain = x.double() @ weight.double().t()
    wanted = {
        "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"), "relu": relu, "silu": silu
    }[name](plain)  # fmt: skip
    found = split_linear(x, split_weight(weight), None, residual, name)
    assert error(found, wanted + residual.double()) < TOLERANCE


def test_rows_that_are_no_multiple_of_a_tile_are_all_written() -> None:
    tile = tile_for(600, 72)
    x = torch.ones(tile.rows + 1, 64, device=DEVICE)
    out = split_linear(x, split_weight(torch.eye(72, 64, device=DEVICE)), None, tile=tile)
    assert out.shape == (tile.rows + 1, 72)
    assert (out[:, :64] == 1).all() and (out[:, 64:] == 0).all()
