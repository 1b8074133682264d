"""The GPU's linear layers for one row, and for a few, against a plain computation in fp64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.gpu import few_rows_linear as few
from penstock.kernels.gpu import skinny_linear as skinny
from penstock.kernels.gpu.few_rows_linear import Shape, few_rows_linear, shape_for
from penstock.kernels.gpu.skinny_linear import skinny_linear

SHAPES = [(1024, 4096), (3072, 1024), (896, 1152), (4096, 4096)] if ON_GPU else [(384, 32)]
ROWS = [1, 2, 3, 8, 13, 16, 32] if ON_GPU else [1, 2, 3, 8, 13, 16]
EPS = 1e-6
Linear = Callable[..., None]


def check(
    linear: Linear, rows: int, shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    """All that stands around a product, beside the plain computation."""
    width, columns = shape
    generator = torch.Generator().manual_seed(3)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(DEVICE)

    x, norm_weight = rand(rows, width), rand(width)
    weight = rand(2 * columns, width) * width**-0.5
    bias = rand(2 * columns) if biased else None
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
    offset = bias.double() if bias is not None else torch.zeros(2 * columns, device=DEVICE)
    both = normed @ weight.double().t() + offset
    gate, up = both[:, :columns], both[:, columns:]

    out = torch.full((rows, columns), float("nan"), dtype=dtype, device=DEVICE)
    linear(x, weight, bias, out, norm_weight=norm_weight, eps=EPS, gated=True)
    assert error(out, torch.nn.functional.silu(gate) * up) < tolerance(dtype)

    half = weight[:columns].contiguous()
    half_bias = bias[:columns].contiguous() if bias is not None else None
    linear(x, half, half_bias, out, norm_weight=norm_weight, eps=EPS)
    assert error(out, gate) < tolerance(dtype)

    before = out.double()
    linear(x, half, half_bias, out, add=True)
    product = wide @ half.double().t() + offset[:columns]
    assert error(out, before + product) < tolerance(dtype)

    linear(x, half, half_bias, out)
    assert error(out, product) < tolerance(dtype)


@pytest.mark.parametrize("dtype", [kind for kind in DTYPES if kind != torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_product_gate_and_sum_equal_the_plain_computation_for_one_row(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    assert skinny.fits(*shape)
    check(skinny_linear, 1, shape, biased, dtype)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("rows", ROWS)
def test_norm_product_gate_and_sum_equal_the_plain_computation_for_a_few_rows(
    rows: int, shape: tuple[int, int]
) -> None:
    assert few.fits(*shape)
    check(few_rows_linear, rows, shape, rows % 2 == 0, DTYPES[0])


def test_a_few_rows_are_multiplied_in_fp32_too() -> None:
    check(few_rows_linear, 5, (256, 48), True, torch.float32)


@pytest.mark.parametrize(
    "shape",
    [Shape(2, 4, 2, 1), Shape(2, 4, 1, 2), Shape(4, 2, 6, 6)],
    ids=str,
)
def test_every_shape_of_the_product_for_a_few_rows_gives_the_same(shape: Shape) -> None:
    """Steps of W and of x in flight: fewer than all, one, all."""

    def linear(*args: torch.Tensor | None, gated: bool = False, **around: object) -> None:
        few_rows_linear(*args, gated=gated, shape=shape, **around)  # type: ignore[arg-type]

    check(linear, 11, (384 if shape.warps == 2 else 768, 64), True, DTYPES[0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [2, 8, 16])
@pytest.mark.parametrize("columns", [48, 1024, 6144, 12288])
@pytest.mark.parametrize("width", [128, 896, 1024, 12288])
def test_the_shape_of_a_product_divides_it(
    width: int, columns: int, rows: int, gated: bool
) -> None:
    shape = shape_for(columns, width, rows, gated)
    steps, left = divmod(width, 32 * shape.warps)
    assert left == 0
    assert columns % (shape.blocks * (8 if gated else 16)) == 0
    assert 1 <= shape.depth <= steps
    assert 1 <= shape.x_depth <= steps


def test_a_row_that_is_not_finite_costs_the_rows_beside_it_nothing() -> None:
    width, columns = 256, 32
    x = torch.ones(3, width, dtype=DTYPES[0], device=DEVICE)
    x[1] = float("nan")
    weight = torch.ones(columns, width, dtype=DTYPES[0], device=DEVICE) / width
    out = torch.zeros(3, columns, dtype=DTYPES[0], device=DEVICE)
    few_rows_linear(x, weight, None, out, norm_weight=torch.ones_like(x[0]), eps=EPS)
    assert out[1].isnan().all()
    assert torch.allclose(out[::2].float(), torch.ones(2, columns, device=DEVICE), atol=1e-2)
