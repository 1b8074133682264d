"""Rows brought forward in place, against a plain copy of them."""

from __future__ import annotations

import pytest
import torch
from support.kernels.triton_device import DEVICE, ON_GPU

from penstock.kernels.gpu.slots import bring_forward

ROWS = 300


@pytest.mark.parametrize("widths", [(96, 64), (130, 40)], ids=str)
@pytest.mark.parametrize(
    ("staying", "moved", "padding"),
    [(0, 1, 0), (0, 2, 62), (5, 70, 3), (64, 64, 64), (100, 0, 28), (0, 299, 0), (3, 130, 0)],
)
def test_scattered_rows_come_first_and_in_order(
    staying: int, moved: int, padding: int, widths: tuple[int, int]
) -> None:
    generator = torch.Generator().manual_seed(staying + moved)
    both = [torch.randn(ROWS, width, generator=generator).to(DEVICE) for width in widths]
    before = [x.clone() for x in both]
    places = torch.randperm(ROWS - staying, generator=generator)[:moved].sort().values + staying
    count = staying + moved + padding
    index = torch.arange(count)
    index[staying : staying + moved] = places
    bring_forward(both[0], both[1], index.to(torch.int32).to(DEVICE))
    for x, old in zip(both, before, strict=True):
        chosen = old[index[: staying + moved].to(DEVICE)]
        assert torch.equal(x[: staying + moved], chosen)
        assert torch.equal(x[staying + moved :], old[staying + moved :])


def test_neighbours_that_move_by_one_do_not_overwrite_each_other() -> None:
    numbers = torch.arange(ROWS, dtype=torch.float32, device=DEVICE)[:, None]
    index = torch.arange(1, ROWS, dtype=torch.int32, device=DEVICE)
    for _ in range(20 if ON_GPU else 1):
        both = numbers.repeat(1, 4096 if ON_GPU else 128), numbers.repeat(1, 64)
        bring_forward(*both, index)
        for x in both:
            assert torch.equal(x[:-1], numbers[1:].expand(-1, x.shape[1]))
