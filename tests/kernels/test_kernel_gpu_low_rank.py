"""Low-rank updates of rows with different adapters, against their reference."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.gpu import low_rank
from penstock.kernels.gpu.activation import gated_product
from penstock.kernels.gpu.added_rows import AddedRows
from penstock.kernels.gpu.low_rank import (
    FEW_TILE,
    MANY_TILE,
    RowTiles,
    expand,
    most_tiles,
    padded_rank,
    row_tiles,
    shrink,
    small_numbers,
)
from penstock.kernels.gpu.norm import add_normed, add_rms_norm
from penstock.kernels.low_rank import StackedLowRank
from penstock.kernels.low_rank import add_stacked as reference

ADAPTERS = 5


def stacked(
    inputs: int, parts: tuple[int, ...], ranks: list[int], rank: int, dtype: torch.dtype
) -> StackedLowRank:
    """Adapters of these ranks, filled up to ``rank``."""
    generator = torch.Generator().manual_seed(0)
    down = torch.randn(len(ranks), len(parts), rank, inputs, generator=generator) * 0.2
    up = torch.randn(len(ranks), sum(parts), rank, generator=generator) * 0.2
    for adapter, own in enumerate(ranks):
        down[adapter, :, own:], up[adapter, :, own:] = 0.0, 0.0
    return StackedLowRank(down.flatten(1, 2).to(dtype), up.to(dtype), parts)


def on_device(adapters: list[int], size: int, padding: int) -> RowTiles:
    """As a step of ``padding`` rows more has it, whose tiles are not all there."""
    rows = len(adapters) + padding
    order, tiles = row_tiles(np.array(adapters), size)
    count = most_tiles(rows, size, ADAPTERS)
    held = np.full((3, count + 3), -1, np.int32)
    held[:, : tiles.shape[1]] = tiles
    rest = np.zeros(rows - len(order))
    both = [torch.from_numpy(each).to(DEVICE) for each in (np.append(order, rest), held)]
    owners = torch.tensor(adapters + [-1] * padding, dtype=torch.int32, device=DEVICE)
    return RowTiles(both[0].int(), both[1], count, rows, size, owners)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("parts", "rank"),
    [((96,), 32), ((160, 48, 48), 32), ((96, 96), 48), ((256, 128, 128), 32), ((128,), 48)],
    ids=str,
)
@pytest.mark.parametrize("size", [FEW_TILE, MANY_TILE])
@pytest.mark.parametrize("programs", [1, 1024])
def test_rows_get_what_their_own_adapter_adds(
    programs: int,
    size: int,
    parts: tuple[int, ...],
    rank: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of parts with and without whole blocks of outputs, and of ranks that are read in pieces; with
    one and with several blocks of outputs for a program."""
    monkeypatch.setattr(low_rank, "_FEW_PROGRAMS", programs)
    ranks, inputs = [4, 16, 1, rank, 24], 1100 if ON_GPU else 72
    layer = stacked(inputs, parts, ranks, rank, dtype)
    draw = np.random.default_rng(size)
    for rows, most in ((1, 1), (40, ADAPTERS), (90, 2), (700 if ON_GPU else 5, ADAPTERS)):
        adapters = draw.integers(-1, most, rows).tolist()
        generator = torch.Generator().manual_seed(rows)
        x = torch.randn(rows, inputs, generator=generator).to(dtype)
        out = torch.randn(rows, sum(parts), generator=generator)
        wanted = reference(out.clone(), x, layer, adapters)
        on = StackedLowRank(layer.down.to(DEVICE), layer.up.to(DEVICE), parts)
        step = on_device(adapters, size, padding=7)
        small = torch.empty(small_numbers(step.rows, layer.down.shape[1]), device=DEVICE)
        small.fill_(float("nan"))
        highest = torch.tensor(ranks, dtype=torch.int32, device=DEVICE)
        for kind in {torch.float32, dtype}:
            found = out.to(DEVICE, kind, copy=True)
            shrink(x.to(DEVICE), on, highest, step, small)
            expand(found, on, highest, step, small)
            assert error(found.cpu(), wanted) < tolerance(dtype)
            without = torch.tensor(adapters) < 0
            assert torch.equal(found.cpu()[without], out.to(kind)[without])
            alone = torch.full_like(found, 7.0)
            expand(alone, on, highest, step, small, add=False)
            assert error((out + alone.cpu())[~without], wanted[~without]) < tolerance(dtype)
            assert (alone[without.to(DEVICE)] == 7.0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_and_gates_add_what_rows_get_more_to_the_product(dtype: torch.dtype) -> None:
    """Rows without an adapter have the bits that they have where there are none."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    x, more, residual = draw(3, 2 * 48), draw(3, 2 * 48), draw(3, 48)
    weights = draw(2, 48)
    without = [1]
    more[without] = float("nan")  # no one has written it
    adapters = torch.tensor([4, -1, 0], dtype=torch.int32, device=DEVICE)
    both = x + more.nan_to_num(0.0)

    def kernels(rows: torch.Tensor, added: torch.Tensor | None) -> list[torch.Tensor]:
        results = []
        for kernel in (add_rms_norm, partial(add_normed, x_weight=weights[1].to(DEVICE))):
            sums, out = residual.clone().to(DEVICE), torch.empty(3, 48, dtype=dtype, device=DEVICE)
            some = None if added is None else AddedRows(added[:, :48].contiguous(), adapters)
            half = rows[:, :48].contiguous()
            kernel(half, residual=sums, weight=weights[0].to(DEVICE), eps=1e-6, out=out, added=some)
            results += [sums, out]
        out = torch.empty(3, 48, dtype=dtype, device=DEVICE)
        gated_product(rows, out, added=None if added is None else AddedRows(added, adapters))
        return [*results, out]

    found = kernels(x.to(DEVICE), more.to(DEVICE))
    for got, wanted in zip(found, kernels(both.to(DEVICE), None), strict=True):
        assert error(got.cpu(), wanted.cpu()) < tolerance(dtype)
    for got, plain in zip(found, kernels(x.to(DEVICE), None), strict=True):
        assert torch.equal(got[without], plain[without])


def test_tiles_hold_the_rows_of_one_adapter_each_and_all_of_them() -> None:
    draw = np.random.default_rng(1)
    for rows in (0, 1, 15, 16, 17, 300):
        adapters = draw.integers(-1, 9, rows)
        order, (owners, first, count) = row_tiles(adapters, 16)
        assert len(owners) <= most_tiles(rows, 16, 9)
        covered = [row for at, n in zip(first, count, strict=True) for row in order[at : at + n]]
        assert covered == list(order) and sorted(order) == list(np.flatnonzero(adapters >= 0))
        for owner, at, n in zip(owners, first, count, strict=True):
            assert 1 <= n <= 16 and (adapters[order[at : at + n]] == owner).all()


def test_ranks_are_filled_up_to_what_tensor_cores_take() -> None:
    assert [padded_rank(rank) for rank in (1, 16, 17, 64, 500)] == [16, 16, 32, 64, 512]
