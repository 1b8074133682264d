"""Linear layers of compressed weights on a Hopper GPU: the same bits as those of plain weights."""

from __future__ import annotations

import pytest
import torch
from support.kernels.triton_device import DEVICE, ON_GPU
from torch import Tensor
from torch.nn.functional import silu

from penstock.kernels.gpu.compressed_weights import compress

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
MOST = 64
ROWS = [1, 7, 8, 9, 16, 17, 31, 32, 33, 63, 64]
SHAPES = [
    (1024, 4096), (2048, 1024), (512, 64), (768, 320), (4096, 6144), (12288, 4096),
    (640, 128), (128, 64), (256, 19200), (512, 9600),
]  # fmt: skip
"""Width and columns of layers: some with fewer tiles than are under way, some for which programs
have three groups of warps, some with two tiles in a step."""
LAYERS = 2


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE).to(torch.bfloat16)


def with_exceptions(weight: Tensor) -> Tensor:
    """Some at every place of a tile, some side by side, some in the last tile."""
    rows, width = weight.shape
    places = torch.randperm(rows * width, device=DEVICE)[: rows * width // 6000]
    weight.view(-1)[places] *= 2.0**-40
    weight[:4, -1] = 0.0
    weight[7, 2:4] = 0.0
    weight[9] = 0.0
    return weight


@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("kind", ["plain", "gated", "divided"])
@pytest.mark.parametrize(("width", "outs"), SHAPES)
def test_layers_have_the_bits_of_plain_weights_for_all_numbers_of_rows(
    width: int, outs: int, kind: str, bias: bool
) -> None:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear
    from penstock.kernels.gpu.rows_linear_hopper import HopperLinear, splits_for

    torch.manual_seed(0)
    gated, divided = kind == "gated", kind == "divided"
    height = 2 * outs if gated else outs
    splits = splits_for(width, outs) if divided else 1
    x = random(MOST + 3, width)
    weights = [with_exceptions(random(height, width) * width**-0.5) for _ in range(LAYERS)]
    weights[1][11] *= 2.0**60
    biases = [random(height) if bias else None for _ in range(LAYERS)]
    plain = HopperLinear(x, weights, biases, (1, MOST), gated=gated, divided=divided)
    small = [compress(weight, gated=gated, splits=splits) for weight in weights]
    linear = CompressedLinear(x, small, biases, (1, MOST), gated=gated)
    for rows in ROWS:
        # What lies behind the rows of a step may be anything.
        x[rows:] = float("nan")
        x[:rows] = random(rows, width)
        for layer in range(LAYERS):
            wanted = plain(layer, rows, torch.empty(rows, outs, device=DEVICE, dtype=x.dtype))
            out = torch.full((rows + 1, outs), float("nan"), device=DEVICE, dtype=x.dtype)
            found = linear(layer, rows, out[:rows])
            assert torch.equal(found, wanted), f"{rows} rows"
            assert out[rows].isnan().all(), "the row behind the last is left alone"


def test_rows_equal_the_plain_computation() -> None:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

    torch.manual_seed(1)
    x, weight = random(MOST, 2048), with_exceptions(random(2048, 2048) * 2048**-0.5)
    linear = CompressedLinear(x, [compress(weight, gated=True)], [None], (1, MOST), gated=True)
    out = torch.empty(MOST, 1024, device=DEVICE, dtype=x.dtype)
    gate, up = (x.double() @ weight.double().t()).split(1024, 1)
    wanted = silu(gate) * up
    error = (linear(0, MOST, out).double() - wanted).norm() / wanted.norm()
    assert error < 4e-3


def test_the_shapes_here_are_computed_in_every_way_that_there_is() -> None:
    from penstock.kernels.gpu.compressed_linear_hopper import shape_for

    found = [
        shape_for(width, 2 * outs // 64 if gated else outs // 64, 1, tile)
        for width, outs in SHAPES for gated in (False, True) for tile in (8, 64)
    ]  # fmt: skip
    assert {(shape.groups, shape.subs) for shape in found} == {(1, 2), (1, 4), (3, 2)}
    assert min(shape.stages for shape in found) == 1


def test_one_row_of_a_buffer_of_one_row_is_multiplied() -> None:
    from penstock.kernels.gpu.compressed_linear_hopper import CompressedLinear

    x, weight = random(1, 512), random(256, 512)
    linear = CompressedLinear(x, [compress(weight)], [None], (1, 1))
    found = linear(0, 1, torch.empty(1, 256, device=DEVICE, dtype=x.dtype))
    wanted = x.double() @ weight.double().t()
    assert (found.double() - wanted).norm() / wanted.norm() < 4e-3
