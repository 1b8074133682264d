"""Products and attention whose sums have one order, against their references and themselves."""

from __future__ import annotations

import pytest
import torch
from support.kernels.triton_device import (
    DEVICE,
    DTYPES,
    ON_GPU,
    error,
    sum_in_order,
    tolerance,
)

from penstock.kernels.gpu import fixed_attention as attention
from penstock.kernels.gpu.attention_arguments import LOG2_E, DecodeBatch, LayerCache
from penstock.kernels.gpu.fixed_attention import PartSums, fixed_attention, part_sums, place_rows
from penstock.kernels.gpu.fixed_linear import fixed_linear, shapes_agree, shapes_for

SIZES = [(200, 136), (1024, 1024), (4096, 6144), (3072, 1024)] if ON_GPU else [(200, 136)]


@pytest.fixture(autouse=True)
def _one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    sum_in_order(monkeypatch)


def normal(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return made.to(dtype).to(DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_a_row_has_the_same_bits_among_any_number_of_rows(
    size: tuple[int, int], dtype: torch.dtype
) -> None:
    width, columns = size
    most = 1300 if ON_GPU else 70
    x, weight = normal(most, width, dtype=dtype), normal(columns, width, dtype=dtype, seed=1)
    bias = normal(columns, dtype=dtype, seed=2)
    whole = fixed_linear(x, weight, bias, x.new_empty(most, columns))
    wanted = x.double() @ weight.double().t() + bias.double()
    assert error(whole, wanted) < tolerance(dtype)
    for rows in (1, 2, 17, 64, 65, 200, 512, 513, 1000) if ON_GPU else (1, 64):
        first = most - rows
        alone = fixed_linear(x[first:], weight, bias, x.new_empty(rows, columns))
        assert torch.equal(alone, whole[first:]), rows
    assert shapes_agree(weight)


def test_shapes_of_few_rows_leave_work_for_a_whole_device() -> None:
    for columns in (1024, 4096, 6144, 24_576, 151_936):
        few, _, many = shapes_for(columns, torch.bfloat16)
        assert columns // few.outputs >= 64
        assert many.outputs == 128


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(6, 2, 64), (8, 1, 32), (4, 4, 128)])
@pytest.mark.parametrize("part", [64, attention.PART])
def test_a_row_attends_to_the_same_bits_however_it_is_computed(
    part: int,
    heads: int,
    kv_heads: int,
    dim: int,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As a decode row of one program or of several, or in any chunk."""
    monkeypatch.setattr(attention, "PART", part)
    monkeypatch.setattr(attention, "_DIVIDED", 1 << 13)
    length, block_size = (1100, 16) if ON_GPU else (70, 16)
    blocks = -(-length // block_size)
    keys, values = (
        normal(2 * blocks, kv_heads, block_size, dim, dtype=dtype, seed=seed) for seed in (1, 2)
    )
    cache, queries = LayerCache(keys, values), normal(length, heads, dim, dtype=dtype)
    order = torch.randperm(2 * blocks, generator=torch.Generator().manual_seed(3))[:blocks]
    table = torch.stack((torch.zeros(blocks), order)).int().to(DEVICE)
    scale = dim**-0.5

    def attend(
        tiles: list[tuple[int, int, int, int]], most: int = 128, sums: PartSums | None = None
    ) -> torch.Tensor:
        out = torch.zeros_like(queries)
        held = torch.tensor([*tiles, (0, 0, 0, 0)], dtype=torch.int32, device=DEVICE)
        placed = held.t().contiguous()
        count = len(tiles) + 1
        fixed_attention(queries, placed, count, table, cache, out, scale * LOG2_E, most, sums)
        return out

    whole = attend([(first, min(128, length - first), 1, first) for first in range(0, length, 128)])
    known = [each[order.to(DEVICE)].transpose(1, 2).flatten(0, 1).double() for each in cache[:2]]
    k, v = (each[:length].repeat_interleave(heads // kv_heads, 1) for each in known)
    score = torch.einsum("qhd,khd->hqk", queries.double(), k) * scale
    unseen = torch.ones(length, length, device=DEVICE).triu(1).bool()
    weight = score.masked_fill(unseen, float("-inf")).softmax(-1)
    assert error(whole, torch.einsum("hqk,khd->qhd", weight, v)) < tolerance(dtype)

    single = attend([(row, 1, 1, row) for row in range(length)], 1)
    assert torch.equal(single, whole)
    some = range(0, length, 7)
    sums = part_sums(length, heads, kv_heads, dim, length, queries.device)
    divided = attend([(row, 1, 1, row) for row in some], 1, sums)
    assert torch.equal(divided[some], whole[some])
    cut = [(0, 5, 1, 0), (5, 40, 1, 5), (45, length - 45 if length < 170 else 128, 1, 45)]
    part = attend(cut)
    assert torch.equal(part[: cut[-1][1] + 45], whole[: cut[-1][1] + 45])


def test_the_memory_of_divided_rows_is_bounded() -> None:
    for rows, positions, wanted in ((256, 4096, 64), (16, 4096, 16), (256, 131_072, 8)):
        sums = part_sums(rows, 16, 8, 128, positions, torch.device("meta"))
        assert sums.weighted.shape == (wanted, 16, -(-positions // attention.PART), 128)
        assert sums.weights.shape[:3] == sums.weighted.shape[:3]


def test_rows_are_placed_where_they_belong() -> None:
    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=DEVICE)

    batch = DecodeBatch(ints(3, 0, -1, -1), ints(10, 11, 12, 13), ints(0))
    slots, positions = ints(*[9] * 6), ints(*[9] * 6)
    tiles = ints(*[9] * 24).view(4, 6)
    chunks = ints(-1, -1, 2, 2, 2, -1, 7), ints(0, 0, 40, 41, 42, 0, 7)
    place_rows(batch, chunks, slots, positions, tiles)
    assert slots.tolist() == [3, 0, 2, 2, 2, -1]
    assert positions[:5].tolist() == [13, 10, 40, 41, 42]
    assert tiles[:, 2:4].tolist() == [[1, 0], [1, 1], [0, 3], [10, 13]], "the longest last"
    assert tiles[1].tolist() == [0, 0, 1, 1, 9, 9]
    place_rows(batch, None, slots[:4], positions[:4], tiles)
    assert slots.tolist() == [3, 0, -1, -1, 2, -1]


def test_rows_of_a_large_step_are_in_the_order_of_their_positions() -> None:
    count = 300
    generator = torch.Generator().manual_seed(0)
    slots = torch.randperm(count, generator=generator).int().to(DEVICE)
    last = torch.randint(0, 40, (count,), generator=generator).int().to(DEVICE)
    tiles = torch.zeros(4, count, dtype=torch.int32, device=DEVICE)
    found, positions = torch.empty_like(slots), torch.empty_like(slots)
    place_rows(DecodeBatch(slots, last, tiles), None, found, positions, tiles)
    assert torch.equal(found, slots) and torch.equal(positions, last[slots.long()])
    order = torch.sort(positions, stable=True)
    assert torch.equal(tiles[0].long(), order.indices)
    assert torch.equal(tiles[3], order.values)
    assert torch.equal(tiles[2], slots[order.indices])
