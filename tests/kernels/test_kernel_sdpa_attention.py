"""Attention by torch's SDPA against the reference, over the same scattered cache."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.scattered_cache import CPU, Scattered

from penstock.kernels import sdpa_attention
from penstock.kernels.attention import ReferenceAttention
from penstock.kernels.attention_backend import CacheShape, QuerySpans
from penstock.kernels.sdpa_attention import FoldedBatch, LoneChunk, SdpaAttention

LENGTHS = [1, 7, 65, 129, 331, 700]
DECODE = [(0, 0, 1), (1, 6, 1), (3, 128, 1), (5, 699, 1), (5, 42, 1)]
PREFILL = [(1, 0, 7), (2, 0, 65), (3, 0, 129), (4, 0, 17), (0, 0, 1)]
CACHED = [(4, 100, 231), (5, 698, 2), (3, 64, 64), (1, 2, 3), (2, 63, 2)]
MIXED = [(0, 0, 1), (5, 699, 1), (3, 100, 29), (4, 11, 320), (2, 0, 64), (1, 6, 1)]
STEPS = {"decode": DECODE, "prefill": PREFILL, "cached prefix": CACHED, "mixed": MIXED}
TOLERANCES = {torch.float32: 3e-6, torch.bfloat16: 4e-2}


def differences(
    lengths: list[int],
    spans: list[tuple[int, int, int]],
    heads: tuple[int, int],
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
) -> float:
    """The most by which the two backends differ in one step."""
    results = [
        Scattered(lengths, *heads, dim, block_size, dtype, exact=False, backend=backend).attend(
            spans
        )
        for backend in (ReferenceAttention(), SdpaAttention())
    ]
    for span, result in zip(spans, results[1], strict=True):
        assert result.shape == (span[2], heads[0] * dim)
        assert result.isfinite().all()
    return max(float((a.float() - b.float()).abs().max()) for a, b in zip(*results, strict=True))


SHAPES = [
    ((4, 4), 64, 16),
    ((4, 2), 80, 16),
    ((3, 1), 96, 32),
    ((8, 2), 80, 64),
    ((10, 2), 128, 24),
    ((6, 1), 80, 24),
    ((7, 1), 64, 64),
    ((8, 1), 96, 16),
]


def shapes_and_steps() -> Iterator[Any]:
    """Each shape with one kind of steps in either type; with all of them in the long run."""
    for number, shape in enumerate(SHAPES):
        for place, step in enumerate(STEPS):
            for dtype in TOLERANCES:
                usual = place == (number + (dtype == torch.bfloat16)) % len(STEPS)
                yield pytest.param(*shape, step, dtype, marks=() if usual else pytest.mark.slow)


@pytest.mark.parametrize(
    ("heads", "dim", "block_size", "step", "dtype"), [*shapes_and_steps()], ids=str
)
def test_a_step_gives_what_the_reference_gives(
    heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype, step: str
) -> None:
    assert differences(LENGTHS, STEPS[step], heads, dim, block_size, dtype) < TOLERANCES[dtype]


@pytest.mark.parametrize(
    ("start", "count"),
    [
        pytest.param(start, count, marks=() if place % 5 == number % 5 else pytest.mark.slow)
        for number, start in enumerate([0, 1, 15, 16, 300])
        for place, count in enumerate([1, 2, 63, 64, 65, 100])
    ],
)
def test_a_chunk_that_is_alone_gives_what_the_reference_gives(start: int, count: int) -> None:
    assert differences([400], [(0, start, count)], (4, 2), 80, 16) < 3e-6


def test_rows_of_equal_context_need_no_mask_and_give_what_the_reference_gives() -> None:
    lengths = [333] * 3
    spans = [(s, 332, 1) for s in range(3)]
    assert differences(lengths, spans, (8, 2), 80, 16) < 3e-6
    (batch,) = planned(starts=[332] * 3, counts=None)
    assert isinstance(batch, FoldedBatch)
    assert batch.mask is None and batch.positions is None
    assert batch.seen == 333


def test_the_kv_heads_of_a_long_context_are_gathered_a_few_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sdpa_attention, "MOST_ELEMENTS", 3 * 400 * 80)
    (batch,) = planned(starts=[300], counts=[100], kv_heads=8)
    assert isinstance(batch, LoneChunk)
    assert batch.heads_at_once == 3
    assert differences([400], [(0, 300, 100)], (16, 8), 80, 16) < 3e-6


def test_no_batch_gathers_more_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    bound = 4 * 2 * 336 * 80
    monkeypatch.setattr(sdpa_attention, "MOST_ELEMENTS", bound)
    batches = planned(starts=list(range(320, 333)), counts=None)
    assert len(batches) == 4
    for batch in batches:
        assert isinstance(batch, FoldedBatch)
        assert len(batch.gather) * 16 * 80 <= bound
    lengths = list(range(300, 313))
    spans = [(s, length - 1, 1) for s, length in enumerate(lengths)]
    assert differences(lengths, spans, (4, 2), 80, 16) < 3e-6


def test_a_long_context_does_not_make_short_ones_gather_as_much() -> None:
    batches = planned(starts=[4000, 20, 30, 40, 1900, 2100], counts=None)
    gathered = [16 * len(batch.gather) // 2 for batch in batches if isinstance(batch, FoldedBatch)]
    assert [batch.places.num_rows for batch in batches] == [2, 1, 3]
    assert gathered == [2 * 4016, 1904, 3 * 48]


def test_short_chunks_attend_together_and_long_ones_alone() -> None:
    batches = planned(starts=[0, 0, 9, 0], counts=[30, 500, 20, 64])
    assert [type(batch) for batch in batches] == [LoneChunk, FoldedBatch]
    assert [batch.places.num_rows for batch in batches] == [500, 3 * 64]
    kept = batches[1].places.kept
    assert kept is not None
    assert len(kept) == 30 + 20 + 64


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("step", list(STEPS))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("heads", "dim", "block_size"),
    [((4, 4), 80, 16), ((8, 2), 96, 24), ((8, 1), 128, 64), ((7, 1), 40, 16), ((5, 1), 36, 8)],
    ids=str,
)
def test_on_a_gpu_both_backends_give_what_the_formula_gives(
    heads: tuple[int, int], dim: int, block_size: int, dtype: torch.dtype, step: str
) -> None:
    for backend in (ReferenceAttention(), SdpaAttention()):
        device = torch.device("cuda")
        scattered = Scattered(
            LENGTHS, *heads, dim, block_size, dtype, exact=False, backend=backend, device=device
        )
        for (sequence, start, count), got in zip(
            STEPS[step], scattered.attend(STEPS[step]), strict=True
        ):
            for index in {*range(0, count, 29), count - 1}:
                want = scattered.exact(sequence, start + index).reshape(-1)
                error = float((got[index] - want).abs().max())
                assert error < (5e-3 if dtype == torch.float32 else 4e-2), backend.name


def planned(
    starts: list[int], counts: list[int] | None, kv_heads: int = 2
) -> list[FoldedBatch | LoneChunk]:
    """Batches of spans with twice as many query heads of 80 and blocks of 16."""
    size = len(starts)
    count = np.ones(size, np.int64) if counts is None else np.array(counts, np.int64)
    spans = QuerySpans(
        np.cumsum(count) - count,
        np.array(starts, np.int64),
        None if counts is None else count,
        np.zeros((size, 512), np.int64),
    )
    shape = CacheShape(kv_heads, 4, 16, 80, 2 * kv_heads, torch.float32)
    batches = SdpaAttention().plan(spans, shape, CPU)
    return [batch for batch in batches if isinstance(batch, FoldedBatch | LoneChunk)]


def test_a_cpu_does_without_the_compiler_that_takes_seconds_to_import() -> None:
    program = (
        "import sys, torch\n"
        "from penstock.kernels.sdpa_attention import SdpaAttention, causal_attention\n"
        "SdpaAttention()\n"
        "causal_attention(*torch.ones(3, 1, 1, 4, 2), 1.0)\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=100)
