"""The GPU's product with quantized weights, beside their reference."""

from __future__ import annotations

from functools import cache

import pytest
import torch

pytest.importorskip("triton")

from support.kernels.quantized_weights import KINDS, quantized_weights
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.gpu.quantized_linear import quantized_linear
from penstock.kernels.quantized_weight import QuantizedWeight


@cache
def weights() -> dict[str, QuantizedWeight]:
    return quantized_weights(320, 1152) if ON_GPU else quantized_weights(80, 192)


def on_device(weight: QuantizedWeight) -> QuantizedWeight:
    moved = [each.to(DEVICE) if isinstance(each, torch.Tensor) else each for each in weight]
    return QuantizedWeight(*moved)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_product_is_that_of_the_dequantized_weight(kind: str, dtype: torch.dtype) -> None:
    """Few rows and many, with and without a bias, into a part of wider rows."""
    weight = on_device(weights()[kind])
    outputs, inputs = weight.shape
    generator = torch.Generator().manual_seed(5)
    for rows, biased in ((3, False), (18, True)):
        x = torch.randn(rows, inputs, generator=generator).to(dtype).to(DEVICE)
        bias = torch.randn(outputs, generator=generator).to(dtype).to(DEVICE) if biased else None
        wide = torch.full((rows, outputs + 5), 7.0, dtype=dtype, device=DEVICE)
        quantized_linear(x, weight, bias, wide[:, 2 : outputs + 2])
        wanted = x.double() @ weight.dequantized(torch.float64).t()
        if bias is not None:
            wanted += bias.double()
        assert error(wide[:, 2 : outputs + 2], wanted) < tolerance(dtype)
        assert bool((wide[:, :2] == 7).all()) and bool((wide[:, outputs + 2 :] == 7).all())


def test_every_code_of_fp8_is_read_as_it_is() -> None:
    """Subnormal ones too; but NaN, which no checkpoint may have."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]
    weight = QuantizedWeight("fp8", codes[:, None].view(torch.float8_e4m3fn).contiguous(), 1)
    x = torch.ones(1, 1, device=DEVICE)
    out = torch.empty(1, len(codes), device=DEVICE)
    quantized_linear(x, on_device(weight), None, out)
    assert torch.equal(out[0].cpu(), weight.codes[:, 0].float())
