"""The Gluon kernel of linear layers on a Hopper GPU, against a plain computation in fp32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.kernels.triton_device import DEVICE, ON_GPU
from torch import Tensor
from torch.nn.functional import gelu, silu

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
ACTIVATIONS = {"silu": silu, "gelu_tanh": partial(gelu, approximate="tanh")}
MOST = 128
ROWS = [1, 7, 8, 9, 16, 17, 31, 32, 33, 64, 65, 100, 128]
SHAPES = [(1024, 4096), (2048, 1024), (3072, 1024), (64, 64), (192, 320), (4096, 6144), (896, 128)]
"""Width and columns of layers, the odd ones with fewer tiles than are under way."""
LAYERS = 2


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["plain", "gated", "gated by GELU", "divided"])
@pytest.mark.parametrize(("width", "outs"), SHAPES)
def test_layers_equal_the_plain_computation_for_all_numbers_of_rows(
    width: int, outs: int, kind: str, bias: bool, dtype: torch.dtype
) -> None:
    from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

    torch.manual_seed(0)
    gated, activation = kind.startswith("gated"), "gelu_tanh" if "GELU" in kind else "silu"
    height = 2 * outs if gated else outs
    x = random(MOST + 3, width, dtype=dtype)
    weights = [random(height, width, dtype=dtype) * width**-0.5 for _ in range(LAYERS)]
    biases = [random(height, dtype=dtype) if bias else None for _ in range(LAYERS)]
    linear = HopperLinear(
        x, weights, biases, (1, MOST), gated=gated, activation=activation,
        divided=kind == "divided",
    )  # fmt: skip
    for rows in ROWS:
        # What lies behind the rows of a step may be anything.
        x[rows:] = float("nan")
        x[:rows] = random(rows, width, dtype=dtype)
        for layer, (weight, added) in enumerate(zip(weights, biases, strict=True)):
            wanted = x[:rows].float() @ weight.float().t()
            if added is not None:
                wanted += added.float()
            if gated:
                wanted = ACTIVATIONS[activation](wanted[:, :outs]) * wanted[:, outs:]
            out = torch.full((rows + 1, outs), float("nan"), device=DEVICE, dtype=dtype)
            found = linear(layer, rows, out[:rows])
            total = found.sum(0) if found.ndim == 3 else found
            error = (total.float() - wanted).norm() / wanted.norm()
            assert error < (4e-3 if dtype == torch.bfloat16 else 6e-4), f"{rows} rows: {error}"
            assert out[rows].isnan().all(), "the row behind the last is left alone"
            again = linear(layer, rows, out[:rows])
            assert torch.equal(again, found), "the same bits"


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["plain", "gated", "gated by GELU", "divided"])
@pytest.mark.parametrize(("width", "outs"), [(1024, 4096), (12288, 4096), (384, 320)])
def test_layers_in_fp8_equal_the_plain_computation_with_their_numbers(
    width: int, outs: int, kind: str, bias: bool
) -> None:
    from penstock.kernels.gpu.fp8_linear import quantize_rows_reference
    from penstock.kernels.gpu.rows_linear_hopper import HopperLinear

    torch.manual_seed(0)
    gated, activation = kind.startswith("gated"), "gelu_tanh" if "GELU" in kind else "silu"
    height, dtype = 2 * outs if gated else outs, torch.bfloat16
    weight, factor = quantize_rows_reference(random(height, width, dtype=dtype) * width**-0.5)
    added = random(height, dtype=dtype) if bias else None
    codes = torch.zeros(MOST + 3, width, device=DEVICE).to(weight.dtype)
    scales = torch.full((MOST + 3,), float("nan"), device=DEVICE)
    linear = HopperLinear(
        codes, [weight], [added], (1, MOST), gated=gated, activation=activation,
        divided=kind == "divided", scales=[factor[:, 0].contiguous()], x_scales=scales,
        out_dtype=dtype,
    )  # fmt: skip
    for rows in ROWS:
        own, own_scales = quantize_rows_reference(random(rows, width, dtype=dtype))
        codes.view(torch.uint8)[:rows] = own.view(torch.uint8)
        scales[:rows] = own_scales[:, 0]
        wanted = (own.float() * own_scales) @ (weight.float() * factor).t()
        if added is not None:
            wanted += added.float()
        if gated:
            wanted = ACTIVATIONS[activation](wanted[:, :outs]) * wanted[:, outs:]
        out = torch.full((rows + 1, outs), float("nan"), device=DEVICE, dtype=dtype)
        found = linear(0, rows, out[:rows])
        total = found.sum(0) if found.ndim == 3 else found
        error = (total.float() - wanted).norm() / wanted.norm()
        assert error < 4e-3, f"{rows} rows: {error}"
        assert out[rows].isnan().all(), "the row behind the last is left alone"
