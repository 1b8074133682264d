"""Norms and gates that leave rows in FP8, beside their references."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from support.kernels.triton_device import DEVICE, ON_GPU, error

from penstock.kernels.gpu.fp8_linear import quantize_rows_reference
from penstock.kernels.gpu.fp8_rows import (
    Fp8Rows,
    add_rms_norm_fp8,
    fp8_rows_in,
    gated_fp8,
    rms_norm_fp8,
    rows_to_fp8,
)

WIDTH, EPS = 192, 1e-5
if ON_GPU and torch.cuda.get_device_capability() < (8, 9):
    pytest.skip("the device has no FP8", allow_module_level=True)


def _random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape))).to(DEVICE)


def _rows(rows: int) -> Fp8Rows:
    return fp8_rows_in(torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device=DEVICE), WIDTH)


def _is_of(found: Fp8Rows, wanted: Tensor) -> None:
    codes, scales = quantize_rows_reference(wanted)
    assert error(found.scales, scales) < 1e-5
    differ = found.codes.view(torch.uint8) != codes.view(torch.uint8)
    # The interpreter rounds some numbers wrongly, to half of what they are.
    assert float(differ.float().mean()) < (0.01 if ON_GPU else 0.05)
    numbers = found.codes.double() * found.scales.double()
    assert error(numbers, wanted) < (0.04 if ON_GPU else 0.1)


def _normed(rows: Tensor, weight: Tensor) -> Tensor:
    rows = rows.double()
    return rows * torch.rsqrt(rows.square().mean(1, keepdim=True) + EPS) * weight.double()


def test_a_norm_leaves_rows_in_fp8() -> None:
    x, weight, out = _random(3, WIDTH), _random(WIDTH), _rows(3)
    rms_norm_fp8(x, weight, EPS, out)
    _is_of(out, _normed(x, weight))


@pytest.mark.parametrize("parts", [1, 3])
def test_a_norm_adds_what_a_product_gave_before(parts: int) -> None:
    """One product, or parts whose sum it is."""
    x, residual, weight = _random(parts, 2, WIDTH), _random(2, WIDTH), _random(WIDTH)
    summed, out = residual.double() + x.double().sum(0), _rows(2)
    add_rms_norm_fp8(x if parts > 1 else x[0], residual, weight, EPS, out)
    assert error(residual, summed) < 1e-6
    _is_of(out, _normed(summed, weight))


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_gate_leaves_rows_in_fp8(activation: str) -> None:
    gate_up, out = _random(2, 2 * WIDTH), _rows(2)
    gated_fp8(gate_up, out, activation)
    gate, up = gate_up.double().chunk(2, 1)
    activated = (
        torch.nn.functional.silu(gate)
        if activation == "silu"
        else torch.nn.functional.gelu(gate, approximate="tanh")
    )
    _is_of(out, activated * up)


def test_rows_lie_in_the_memory_of_others_and_no_further() -> None:
    memory = torch.full((4, WIDTH), 7.0, dtype=torch.bfloat16, device=DEVICE)
    rows = fp8_rows_in(memory, WIDTH)
    assert rows.codes.data_ptr() == memory.data_ptr() and rows.codes.is_contiguous()
    x = _random(4, WIDTH)
    rows_to_fp8(x[:2], rows.first(2))
    _is_of(rows.first(2), x[:2])
    written = 4 * (WIDTH + 4)
    untouched = memory.view(torch.uint8).view(-1)[written:]
    assert torch.equal(untouched, torch.full_like(memory, 7.0).view(torch.uint8).view(-1)[written:])
    with pytest.raises(ValueError, match="no room"):
        fp8_rows_in(memory, 2 * WIDTH)
