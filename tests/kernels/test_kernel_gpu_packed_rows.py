"""Attention and pooling of prompts without padding, against plain computations in fp64."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance
from torch import Tensor

from penstock.kernels.gpu.packed_rows import (
    KINDS,
    DistanceBias,
    packed_attention,
    packed_tiles,
    pool_rows,
    tiles_for,
)

LENGTHS = [1, 63, 64, 65, 130, 7, 512, 300] if ON_GPU else [1, 64, 70, 3]
SHAPES = [(4, 4, 32), (6, 2, 48), (12, 12, 64), (4, 1, 256), (2, 2, 128)]


def spans_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [(end - length, end) for end, length in zip(ends, lengths, strict=True)]


def expected(
    qkv: tuple[Tensor, Tensor, Tensor], scale: float, window: int, bias: DistanceBias | None
) -> Tensor:
    """[N, heads, D] fp64, prompt by prompt."""
    query, key, value = (one.double().cpu() for one in qkv)
    shared = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(shared, 1) for one in (key, value))
    parts = []
    for begin, end in spans_of(LENGTHS):
        q, k, v = (one[begin:end] for one in (query, key, value))
        scores = torch.einsum("nhd,mhd->hnm", q, k) * scale
        at = torch.arange(end - begin)
        distance = at[None, :] - at[:, None]
        if bias is not None:
            known = distance.clamp(-bias.middle, bias.middle) + bias.middle
            scores += bias.table.double().cpu()[:, known]
        if window:
            scores.masked_fill_(distance.abs() > window, -torch.inf)
        parts.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v))
    return torch.cat(parts)


def cases() -> Iterator[Any]:
    """All; without a GPU, with every run, each two of shape, window and bias together once."""
    shapes = SHAPES if ON_GPU else SHAPES[:2]
    for at, kinds in enumerate(itertools.product(shapes, [0, 16], [False, True])):
        usual = ON_GPU or at in (0, 3, 5, 6)
        yield pytest.param(*kinds, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("shape", "window", "biased"), cases(), ids=str)
def test_rows_attend_to_their_own_prompt_in_both_directions(
    shape: tuple[int, int, int], window: int, biased: bool, dtype: torch.dtype
) -> None:
    heads, kv_heads, dim = shape
    generator = torch.Generator().manual_seed(dim)
    rows = sum(LENGTHS)
    fused = torch.randn(rows, heads + 2 * kv_heads, dim, generator=generator).to(DEVICE, dtype)
    qkv = fused.split((heads, kv_heads, kv_heads), 1)
    bias = None
    if biased:
        table = torch.randn(heads, 2 * 40 + 1, generator=generator).to(DEVICE)
        bias = DistanceBias(table, 40)
    count = tiles_for(rows, len(LENGTHS))
    tiles = torch.zeros(count, 3, dtype=torch.int32)
    found = packed_tiles(spans_of(LENGTHS))
    tiles[: len(found)] = torch.from_numpy(found)
    out = torch.full((rows + 5, heads, dim), float("nan"), dtype=dtype, device=DEVICE)
    packed_attention(*qkv, tiles.to(DEVICE), out, 0.3, window, bias)
    wanted = expected(qkv, 0.3, window, bias)
    assert error(out[:rows].cpu(), wanted) < tolerance(dtype)
    assert out[rows:].isnan().all(), "rows of no prompt are left alone"


@pytest.mark.parametrize("kind", KINDS)
def test_states_are_pooled_by_prompt(kind: str) -> None:
    rows, width = sum(LENGTHS), 200
    states = torch.randn(rows, width, generator=torch.Generator().manual_seed(1))
    spans = spans_of(LENGTHS)
    given = torch.tensor([*spans, (0, 0)], dtype=torch.int32, device=DEVICE)
    out = torch.full((len(given), width), float("nan"), device=DEVICE)
    pool_rows(states.to(DEVICE), given, kind, out)
    reduce = {
        "cls": lambda x: x[0], "last": lambda x: x[-1], "mean": lambda x: x.mean(0),
        "max": lambda x: x.amax(0),
    }[kind]  # fmt: skip
    wanted = torch.stack([reduce(states[begin:end].double()) for begin, end in spans])
    assert error(out[:-1].cpu(), wanted) < 1e-6
    assert out[-1].isnan().all(), "no prompt, nothing written"


def test_no_set_of_prompts_has_more_tiles_than_are_counted() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(200):
        lengths = torch.randint(1, 200, (int(torch.randint(1, 9, (1,), generator=generator)),))
        found = packed_tiles(spans_of(lengths.tolist()))
        assert len(found) <= tiles_for(int(lengths.sum()), len(lengths))
