"""The Gluon kernel of gated products on a Hopper GPU, against a plain computation in fp32."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from support.kernels.triton_device import DEVICE, ON_GPU, error
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
MOST = 2700
"""Rows of the buffers, no whole number of tiles."""
ROWS = [1, 64, 127, 128, 129, 500, 2049, MOST]
SHAPES = [(1024, 3072), (64, 128), (4096, 1280), (192, 384)]
"""Width and columns, some with fewer tiles than are under way, and of no whole band."""
LAYERS = 2


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, device=DEVICE, dtype=torch.float32).to(dtype)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("width", "outs"), SHAPES)
def test_gated_products_equal_the_plain_computation_for_all_numbers_of_rows(
    width: int, outs: int, dtype: torch.dtype, activation: str
) -> None:
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear

    torch.manual_seed(0)
    x = torch.empty(MOST, width, device=DEVICE, dtype=dtype)
    out = torch.empty(MOST, outs, device=DEVICE, dtype=dtype)
    weights = [random(2 * outs, width, dtype=dtype) * width**-0.5 for _ in range(LAYERS)]
    linear = HopperGatedLinear(x, weights, out, activation)
    for rows in ROWS:
        # What lies behind the rows of a step may be anything.
        x.fill_(float("nan"))
        x[:rows] = random(rows, width, dtype=dtype)
        end = -(-rows // 128) * 128
        for layer, weight in enumerate(weights):
            gate, up = (x[:rows].float() @ weight.float().t()).chunk(2, 1)
            out.fill_(-7.0)
            linear(layer, rows)
            found = out[:rows].clone()
            tolerance = 4e-3 if dtype == torch.bfloat16 else 6e-4
            assert error(found, ACTIVATIONS[activation](gate) * up) < tolerance, f"{rows} rows"
            assert (out[end:] == -7.0).all(), "rows behind the last tile are left alone"
            linear(layer, rows)
            assert torch.equal(out[:rows], found), "the same bits"


def test_a_graph_gives_the_bits_of_the_launch_that_it_records() -> None:
    from penstock.kernels.gpu.gated_linear_hopper import HopperGatedLinear

    torch.manual_seed(0)
    x = random(700, 1024, dtype=torch.bfloat16)
    out = torch.full((700, 3072), float("nan"), device=DEVICE, dtype=torch.bfloat16)
    linear = HopperGatedLinear(x, [random(6144, 1024, dtype=torch.bfloat16)], out)
    linear(0, 700)
    first = out.clone()
    assert first.isfinite().all()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        linear(0, 700)
    out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(out, first)
