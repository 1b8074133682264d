"""Exact attention of longer chunks on the CPU: the bits of a row, and what is read and taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.scattered_cache import CPU, Scattered

from penstock.kernels import attention
from penstock.kernels.attention import ReferenceAttention, paged_attention, plan_groups
from penstock.kernels.attention_backend import CacheShape, QuerySpans
from penstock.kernels.exact_attention import KV_TILE, ExactChunk

LENGTH = 760
SIZES = (1, 4, 7, 31, 33, 64, 188, 512, 700)
"""Of chunks; with them every kind of piece: padded, cut at its end, at its begin, and whole."""
PATTERNS: dict[str, dict[str, Any]] = {
    "all": {},
    "window": {"window": 100},
    "window over tiles": {"window": 300},
    "chunks": {"chunk": 96},
    "soft cap and sinks": {"softcap": 2.0, "sinks": True},
    "window and sinks": {"window": 37, "sinks": True},
}
SHAPES = [(9, 3, 64), (4, 1, 256), (14, 2, 64), (6, 6, 80), (71, 1, 64), (16, 2, 128)]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def spans_of(size: int, sequence: int = 0, length: int = LENGTH) -> list[tuple[int, int, int]]:
    return [(sequence, start, min(size, length - start)) for start in range(0, length, size)]


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_a_row_has_the_same_bits_in_every_chunking_alone_and_beside_others(
    pattern: dict[str, Any],
) -> None:
    lengths = [LENGTH, 70, 300]
    paged = Scattered(lengths, 6, 2, 32, 16, **pattern)
    whole = [paged.attend([(s, 0, n)])[0] for s, n in enumerate(lengths)]
    for index in range(0, LENGTH, 97):
        assert (whole[0][index] - paged.exact(0, index).reshape(-1)).abs().max() < 3e-6
    others = [(1, 69, 1), (2, 120, 180), (1, 3, 40), (2, 299, 1), (1, 0, 3)]
    for size in SIZES:
        spans = spans_of(size)[:: 41 if size == 1 else 5 if size < 10 else 1]
        alone = [paged.attend([span])[0] for span in spans]
        beside = paged.attend([*others, *spans])
        for got, (sequence, start, count) in zip(
            [*alone, *beside], [*spans, *others, *spans], strict=True
        ):
            assert torch.equal(got, whole[sequence][start : start + count]), (size, start)


@pytest.mark.parametrize(
    "pattern", [PATTERNS["all"], PATTERNS["window over tiles"]], ids=["all", "window"]
)
@pytest.mark.usefixtures("two_threads")
def test_a_row_has_the_same_bits_with_one_and_two_threads(pattern: dict[str, Any]) -> None:
    paged = Scattered([LENGTH], 9, 3, 64, 16, **pattern)
    steps = [spans_of(size)[-2:] for size in (*SIZES, LENGTH)]
    many = [paged.attend(spans) for spans in steps]
    torch.set_num_threads(1)
    for spans, found in zip(steps, many, strict=True):
        for got, one in zip(found, paged.attend(spans), strict=True):
            assert torch.equal(got, one), spans


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), SHAPES)
@pytest.mark.parametrize("block_size", [16, 64])
def test_a_chunk_has_the_bits_of_groups_of_queries(
    heads: int, kv_heads: int, dim: int, block_size: int
) -> None:
    """What decode rows and short chunks are computed with."""
    start, count = 157, 310
    paged = Scattered([start + count], heads, kv_heads, dim, block_size)
    (got,) = paged.attend([(0, start, count)])
    owners, offsets, real = attention.cut(np.array([count]))
    groups = plan_groups(offsets, start + offsets, real, paged.tables[owners], paged.shape, CPU)
    caches = paged.key_cache, paged.value_cache
    want = paged_attention(paged.query[0][start:], *caches, groups, dim**-0.5)
    assert torch.equal(got, want)
    assert (got[-1] - paged.exact(0, start + count - 1).reshape(-1)).abs().max() < 3e-6


@pytest.mark.parametrize("pattern", [{}, {"window": 200}], ids=["all", "window"])
def test_keys_that_are_read_a_few_tiles_at_a_time_give_the_same_bits(
    pattern: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    paged = Scattered([1000], 4, 4, 32, 16, **pattern)
    spans = [(0, 90, 700)]
    (whole,) = paged.attend(spans)
    for tiles in (1, 3):
        elements = {"cpu": tiles * KV_TILE * 4 * 32}
        monkeypatch.setattr(attention, "_MAX_TILE_ELEMENTS", elements)
        (batch,) = planned(paged, 90, 700)
        assert batch.tiles_at_once == tiles
        assert torch.equal(paged.attend(spans)[0], whole)


def planned(paged: Scattered, start: int, count: int) -> list[ExactChunk]:
    one = np.array([start]), np.array([count])
    spans = QuerySpans(np.zeros(1, np.int64), *one, paged.tables)
    batches = ReferenceAttention().plan(spans, paged.shape, CPU)
    assert all(isinstance(batch, ExactChunk) for batch in batches)
    return [batch for batch in batches if isinstance(batch, ExactChunk)]


def test_tiles_ahead_of_a_window_are_neither_read_nor_computed() -> None:
    start, count = 1100, 436
    paged = Scattered([start + count], 4, 2, 32, 16, window=100)
    for cache in (paged.key_cache, paged.value_cache):
        cache[:, paged.tables[0, : (start - 99) // KV_TILE * KV_TILE // 16]] = torch.nan
    (got,) = paged.attend([(0, start, count)])
    for index in (0, 1, 180, 435):
        want = paged.exact(0, start + index).reshape(-1)
        assert (got[index] - want).abs().max() < 3e-6
    (batch,) = planned(paged, start, count)
    assert all(len(piece.tiles) <= 2 + piece.queries // KV_TILE for piece in batch.pieces)


def test_queries_take_part_only_in_tiles_of_which_they_see_some() -> None:
    shape = CacheShape(3, 128, 16, 64, 9, torch.float32, True)
    tables = np.arange(128, dtype=np.int64)[None]
    spans = QuerySpans(np.zeros(1, np.int64), np.array([0]), np.array([1900]), tables)
    (batch,) = ReferenceAttention().plan(spans, shape, CPU)
    assert isinstance(batch, ExactChunk)
    computed = sum(
        (tile.end - tile.first) * KV_TILE for piece in batch.pieces for tile in piece.tiles
    )
    assert computed == sum(-(-(at + 1) // KV_TILE) * KV_TILE for at in range(1900))
    masked = [tile for piece in batch.pieces for tile in piece.tiles if tile.hidden is not None]
    assert len(masked) == -(-1900 // KV_TILE)
