"""Powers of two: the same bits at every place and with every number of threads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from penstock.kernels.activation import silu_and_mul
from penstock.kernels.powers_of_two import VECTORS, exp2_in_place
from penstock.kernels.rotary import apply_rotary

LARGEST = 5 * 32768 + 7 * VECTORS
"""Elements: more than four threads get their share of."""
COUNTS = (VECTORS, 32768 - VECTORS, 32768 + VECTORS, 3 * 32768 - VECTORS, 4 * 32768, LARGEST)


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def differences(count: int) -> torch.Tensor:
    """Of scores and their maxima."""
    found = torch.randn(count, generator=torch.Generator().manual_seed(3)).mul_(20.0)
    found[::7], found[1::50], found[2::50] = -torch.inf, 0.0, -1e30
    return found


@pytest.mark.usefixtures("threads")
def test_a_power_has_the_same_bits_at_every_place_with_every_number_of_threads() -> None:
    x = differences(LARGEST)
    # Few enough for one thread, and whole vectors.
    want = torch.cat([part.exp2() for part in x.split(VECTORS)])
    for threads in range(1, 6):
        torch.set_num_threads(threads)
        for count in COUNTS:
            for first in (0, 5 * VECTORS, LARGEST - count):
                part = slice(first, min(first + count, LARGEST))
                assert torch.equal(exp2_in_place(x[part].clone()), want[part]), (threads, count)


def test_powers_are_exact_to_the_last_bits() -> None:
    x = differences(1 << 14).clamp_(min=-100.0, max=100.0)
    exact = x.double().exp2()
    assert ((exp2_in_place(x.clone()) - exact) / exact).abs().max() < 2.0**-22
    assert exp2_in_place(torch.full((VECTORS,), -torch.inf)).sum() == 0.0


@pytest.mark.parametrize("width", [96, 100])
@pytest.mark.usefixtures("threads")
def test_a_row_of_a_gated_activation_has_the_same_bits_alone(width: int) -> None:
    torch.manual_seed(0)
    gate_up = torch.randn(1030, 2 * width).mul_(4.0)
    torch.set_num_threads(2)
    whole = silu_and_mul(gate_up)
    torch.set_num_threads(1)
    for first, end in ((0, 1), (3, 67), (64, 1030), (1029, 1030)):
        assert torch.equal(silu_and_mul(gate_up[first:end]), whole[first:end])
    gate, up = gate_up.double().chunk(2, -1)
    want = torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(whole.double(), want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_row_is_rotated_to_the_same_bits_alone(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    # Queries and keys as they stand beside the values of each row.
    x = torch.randn(150, 5, 32).to(dtype)[:, :4]
    cos, sin = torch.randn(150, 1, 32), torch.randn(150, 1, 32)
    whole = apply_rotary(x, cos, sin)
    assert whole.dtype == torch.float32 and whole.is_contiguous()
    for part in (slice(0, 1), slice(60, 70), slice(149, 150), slice(1, 131)):
        assert torch.equal(apply_rotary(x[part], cos[part], sin[part]), whole[part])
