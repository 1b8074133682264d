"""Paged attention against a plain float64 computation, and the identity of its results."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.scattered_cache import CPU, Scattered

from penstock.kernels.attention import plan_groups
from penstock.kernels.block_pattern import BlockPattern

PATTERNS: dict[str, dict[str, Any]] = {
    "window": {"window": 100},
    "window of a block": {"window": 64},
    "window of one": {"window": 1},
    "soft cap": {"softcap": 2.0},
    "both": {"window": 130, "softcap": 2.0},
    "sinks": {"sinks": True},
    "window and sinks": {"window": 100, "sinks": True},
    "all": {"window": 130, "softcap": 2.0, "sinks": True},
    "chunks": {"chunk": 48},
    "chunks of a tile": {"chunk": 128},
    "chunks and window": {"chunk": 96, "window": 70},
    "first blocks": {"window": 50, "besides": BlockPattern(first=2)},
    "every third block": {"chunk": 48, "besides": BlockPattern(every=3)},
    "all kinds of blocks": {"window": 9, "sinks": True, "besides": BlockPattern(1, 20)},
}
IN_SHORT = ("window", "all", "chunks and window", "every third block", "all kinds of blocks")
"""Every kind is in one of these."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "block_size", "exact"),
    [
        pytest.param(
            heads, kv_heads, block_size, exact,
            marks=() if (block_size == 8) is (number < 2) and exact is (number % 2 == 1)
            else pytest.mark.slow,
        )
        for number, (heads, kv_heads) in enumerate([(4, 4), (4, 2), (6, 1), (10, 2)])
        for block_size in (8, 64)
        for exact in (False, True)
    ],
)  # fmt: skip
def test_mixed_batches_equal_the_formula(
    heads: int, kv_heads: int, block_size: int, exact: bool
) -> None:
    lengths = [1, 7, 129, 300, 1200]
    paged = Scattered(lengths, heads, kv_heads, 16, block_size, exact=exact)
    spans = [(0, 0, 1), (1, 2, 5), (2, 128, 1), (3, 100, 180), (3, 299, 1), (4, 1199, 1)]
    for (sequence, start, count), got in zip(spans, paged.attend(spans), strict=True):
        for index in range(0, count, 29):
            want = paged.exact(sequence, start + index).reshape(-1)
            assert (got[index] - want).abs().max() < 3e-6


@pytest.mark.parametrize(
    ("exact", "pattern"),
    [
        pytest.param(
            exact, pattern, id=f"{name}-{exact}",
            marks=() if exact is (number % 2 == 1) else pytest.mark.slow,
        )
        for number, (name, pattern) in enumerate(PATTERNS.items())
        for exact in (False, True)
    ],
)  # fmt: skip
def test_windows_soft_caps_and_sinks_equal_the_formula(
    exact: bool, pattern: dict[str, Any]
) -> None:
    paged = Scattered([1, 40, 129, 300, 1200], 6, 2, 16, 16, exact=exact, **pattern)
    spans = [(0, 0, 1), (1, 30, 10), (2, 128, 1), (3, 60, 200), (4, 1199, 1), (3, 299, 1)]
    for (sequence, start, count), got in zip(spans, paged.attend(spans), strict=True):
        for index in range(0, count, 13):
            want = paged.exact(sequence, start + index).reshape(-1)
            assert (got[index] - want).abs().max() < 3e-6, (sequence, start + index)
    for position in (0, 15, 16, 127, 128, 512, 1199):
        got = paged.attend([(4, position, 1)])[0][0]
        assert (got - paged.exact(4, position).reshape(-1)).abs().max() < 3e-6


@pytest.mark.parametrize("exact", [False, True])
def test_a_mask_of_blocks_counts_for_its_own_sequence(exact: bool) -> None:
    paged = Scattered([700, 300, 90], 4, 2, 16, 16, exact=exact, window=20)
    masks = np.random.default_rng(1).random(paged.tables.shape) < 0.2
    paged.besides = masks
    spans = [(0, 699, 1), (1, 250, 40), (2, 89, 1), (0, 300, 33)]
    for (sequence, start, count), got in zip(spans, paged.attend(spans), strict=True):
        for index in range(0, count, 8):
            want = paged.exact(sequence, start + index).reshape(-1)
            assert (got[index] - want).abs().max() < 3e-6, (sequence, start + index)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize(("start", "count"), [(1199, 1), (1150, 40)])
def test_blocks_that_no_query_sees_are_not_read(exact: bool, start: int, count: int) -> None:
    pattern = BlockPattern(first=1, every=60)
    paged = Scattered([1200], 4, 2, 16, 16, exact=exact, window=100, besides=pattern)
    end = start + count
    first_seen = start + 1 - 100
    unseen = [block for block in range(first_seen // 16) if block % 60]
    for cache in (paged.key_cache, paged.value_cache):
        cache[:, paged.tables[0, unseen]] = torch.nan
    (got,) = paged.attend([(0, start, count)])
    assert (got[-1] - paged.exact(0, end - 1).reshape(-1)).abs().max() < 3e-6
    rows, positions = np.arange(count)[None], np.arange(start, end)[None]
    arguments = rows, positions, None, paged.tables, paged.shape, CPU, paged.besides
    (batch,) = plan_groups(*arguments)
    width = batch.tiles[0].width
    some = {at // width for at in (0, 60 * 16, *range(first_seen, end))}
    assert len(batch.tiles) == len(some) < -(-end // width)


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2)])
def test_a_row_that_is_alone_equals_the_formula(heads: int, kv_heads: int) -> None:
    paged = Scattered([1100], heads, kv_heads, 16, 16, exact=False)
    for position in (0, 15, 16, 128, 510, 511, 512, 1023, 1024, 1099):
        got = paged.attend([(0, position, 1)])[0][0]
        assert (got - paged.exact(0, position).reshape(-1)).abs().max() < 3e-6


def test_bf16_stays_within_its_precision() -> None:
    paged = Scattered([200, 40], 8, 2, 64, 16, torch.bfloat16, exact=False)
    spans = [(0, 199, 1), (1, 0, 40)]
    decoded, chunk = paged.attend(spans)
    assert (decoded[0] - paged.exact(0, 199).reshape(-1)).abs().max() < 4e-3
    assert (chunk[39] - paged.exact(1, 39).reshape(-1)).abs().max() < 4e-2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "pattern"),
    [
        *((4, 2, 32, {}), (5, 1, 16, {})),
        *(
            pytest.param(*shape, {}, marks=pytest.mark.slow)
            for shape in ((2, 2, 64), (14, 2, 64), (16, 8, 128))
        ),
        *(
            pytest.param(4, 2, 32, pattern, marks=() if name in IN_SHORT else pytest.mark.slow)
            for name, pattern in PATTERNS.items()
        ),
    ],
)
def test_a_row_has_the_same_bits_in_every_chunking_and_batch(
    heads: int, kv_heads: int, dim: int, pattern: dict[str, Any]
) -> None:
    lengths = [700, 3, 130, 257, 64, 511]
    paged = Scattered(lengths, heads, kv_heads, dim, 16, **pattern)
    whole = [paged.attend([(s, 0, n)])[0] for s, n in enumerate(lengths)]
    for size in (1, 7, 32, 100, 256):
        for sequence in (0, 3):
            spans = [
                (sequence, start, min(size, lengths[sequence] - start))
                for start in range(0, lengths[sequence], size)
            ]
            if size == 1:
                spans = spans[::23]
            # Each alone, and all of them in one step.
            for got, (_, start, count) in zip(paged.attend(spans), spans, strict=True):
                assert torch.equal(got, whole[sequence][start : start + count])
            _, start, count = spans[-1]
            alone = paged.attend([spans[-1]])[0]
            assert torch.equal(alone, whole[sequence][start : start + count])
    mixed = [(5, 510, 1), (0, 0, 33), (1, 2, 1), (3, 256, 1), (2, 64, 66), (4, 0, 64), (0, 699, 1)]
    for got, (sequence, start, count) in zip(paged.attend(mixed), mixed, strict=True):
        assert torch.equal(got, whole[sequence][start : start + count])


@pytest.mark.parametrize("exact", [False, True])
def test_what_other_sequences_left_in_a_block_never_reaches_a_row(exact: bool) -> None:
    paged = Scattered([5, 131], 4, 2, 16, 64, exact=exact)
    for got in paged.attend([(0, 0, 5), (1, 130, 1)]):
        assert float(got.abs().max()) < 100


def test_large_bf16_products_stay_within_the_precision_of_bf16() -> None:
    """More gathered elements than are computed in fp32."""
    lengths = [150 + i for i in range(12)]
    paged = Scattered(lengths, 8, 4, 64, 16, torch.bfloat16, exact=False)
    outs = paged.attend([(s, length - 1, 1) for s, length in enumerate(lengths)])
    for sequence, (out, length) in enumerate(zip(outs, lengths, strict=True)):
        assert (out[0] - paged.exact(sequence, length - 1).reshape(-1)).abs().max() < 4e-2


def test_many_groups_are_split_into_products_of_bounded_size() -> None:
    lengths = [40] * 40
    paged = Scattered(lengths, 16, 16, 128, 16)
    rows = np.arange(40)[:, None]
    batches = plan_groups(rows, np.full((40, 1), 39), None, paged.tables, paged.shape, CPU)
    assert len(batches) > 1
    assert sum(batch.num_groups for batch in batches) == 40
    outs = paged.attend([(s, 39, 1) for s in range(40)])
    assert all(torch.equal(outs[s], paged.attend([(s, 39, 1)])[0]) for s in (0, 20, 39))
