"""The GPU's linear layers for one row against a plain computation in fp64."""

from __future__ import annotations

import pytest
import torch
from triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.gpu.skinny_linear import fits, skinny_linear

SHAPES = [(1024, 4096), (3072, 1024), (896, 1152), (4096, 4096)] if ON_GPU else [(384, 32)]
EPS = 1e-6


@pytest.mark.parametrize("dtype", [kind for kind in DTYPES if kind != torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_norm_product_gate_and_sum_equal_the_plain_computation(
    shape: tuple[int, int], biased: bool, dtype: torch.dtype
) -> None:
    width, columns = shape
    assert fits(width, columns)
    generator = torch.Generator().manual_seed(3)

    def rand(*size: int) -> torch.Tensor:
        return torch.randn(*size, generator=generator).to(dtype).to(DEVICE)

    x, norm_weight = rand(1, width), rand(width)
    weight = rand(2 * columns, width) * width**-0.5
    bias = rand(2 * columns) if biased else None
    wide = x.double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * norm_weight.double()
    offset = bias.double() if bias is not None else 0.0
    both = normed @ weight.double().t() + offset
    gate, up = both[:, :columns], both[:, columns:]

    out = torch.full((1, columns), float("nan"), dtype=dtype, device=DEVICE)
    skinny_linear(x, weight, bias, out, norm_weight=norm_weight, eps=EPS, gated=True)
    assert error(out, torch.nn.functional.silu(gate) * up) < tolerance(dtype)

    half = weight[:columns].contiguous()
    half_bias = bias[:columns].contiguous() if bias is not None else None
    skinny_linear(x, half, half_bias, out, norm_weight=norm_weight, eps=EPS)
    assert error(out, gate) < tolerance(dtype)

    before = out.double()
    skinny_linear(x, half, half_bias, out, add=True)
    half_offset = offset[:columns] if biased else 0.0  # type: ignore[index]
    assert error(out, before + wide @ half.double().t() + half_offset) < tolerance(dtype)
