"""The Gluon kernel of prefill attention on a Hopper GPU, against a plain computation in fp64."""

from __future__ import annotations

import pytest
import torch
from support.kernels.paged_sequences import Case, Paged, tiles_of
from support.kernels.triton_device import DEVICE, ON_GPU, error, tolerance
from torch import Tensor

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
LENGTHS = [0, 1, 70, 128, 1000, 2047, 300, 500]
SIZES = [1, 130, 300, 128, 40, 513, 64, 65]
"""Queries of the chunks behind ``LENGTHS``: one, odd ends, whole tiles, one group of a tile."""
CASES = [
    *(Case(8, 4, 128, block_size, False, LENGTHS) for block_size in (8, 16, 32, 64, 128)),
    *(Case(8, 4, 64, block_size, False, LENGTHS) for block_size in (8, 64)),
    *(Case(16, 16 // shared, 128, 16, False, LENGTHS) for shared in (1, 4, 8, 16)),
    Case(14, 2, 64, 16, False, LENGTHS),
]


class Chunks:
    """Queries of chunks whose keys and values lie in a cache with NaN in its unused places."""

    def __init__(self, case: Case, dtype: torch.dtype, sizes: list[int]) -> None:
        starts = case.lengths
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        self.paged = Paged(case._replace(lengths=ends), dtype, room=0)
        self.starts, self.sizes = starts, sizes
        self.queries = self.paged.rand(sum(sizes), case.heads, case.dim)
        self.tiles = tiles_of(starts, sizes)
        self.out = torch.full_like(self.queries, float("nan"))

    def attend(self) -> None:
        from penstock.kernels.gpu.prefill_attention_hopper import HopperPrefillAttention

        paged = self.paged
        # The layer asked for is the second; the first holds nothing of use.
        keys = torch.stack([torch.full_like(paged.keys, float("nan")), paged.keys])
        values = torch.stack([torch.full_like(paged.values, float("nan")), paged.values])
        attention = HopperPrefillAttention(keys, values, self.queries)
        self.call = lambda: attention(
            1, self.queries, self.tiles, self.tiles.shape[1], paged.table, self.out
        )
        self.call()

    def wanted(self) -> Tensor:
        parts = self.queries.split(self.sizes)
        return torch.cat(
            [
                self.paged.attend(part, index, start)
                for index, (part, start) in enumerate(zip(parts, self.starts, strict=True))
            ]
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_behind_prefixes_equal_the_plain_computation(case: Case, dtype: torch.dtype) -> None:
    chunks = Chunks(case, dtype, SIZES)
    chunks.attend()
    for index, (found, wanted) in enumerate(
        zip(chunks.out.split(SIZES), chunks.wanted().split(SIZES), strict=True)
    ):
        assert error(found, wanted) < tolerance(dtype), f"{SIZES[index]} after {LENGTHS[index]}"


@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[10], CASES[11]], ids=str)
def test_a_large_step_whose_programs_do_several_tiles_equals_the_plain_computation(
    case: Case,
) -> None:
    sizes = [*SIZES, 1700, 1, 2000]
    starts = [*LENGTHS, 0, 64, 33]
    chunks = Chunks(case._replace(lengths=starts), torch.bfloat16, sizes)
    chunks.attend()
    for index, (found, wanted) in enumerate(
        zip(chunks.out.split(sizes), chunks.wanted().split(sizes), strict=True)
    ):
        assert error(found, wanted) < tolerance(torch.bfloat16), f"{sizes[index]}"


def test_empty_tiles_of_a_large_step_are_passed_over() -> None:
    """A graph's launch covers more tiles than a step has."""
    sizes = [*SIZES, 3000]
    chunks = Chunks(CASES[1]._replace(lengths=[*LENGTHS, 0]), torch.bfloat16, sizes)
    chunks.tiles = torch.nn.functional.pad(chunks.tiles, (0, 19))
    assert sum(sizes) > 4096, "large enough for programs that do several tiles"
    chunks.attend()
    assert error(chunks.out, chunks.wanted()) < tolerance(torch.bfloat16)


def test_rows_of_no_tile_are_not_written() -> None:
    chunks = Chunks(CASES[1], torch.bfloat16, SIZES)
    chunks.tiles[1, 3:] = 0
    chunks.attend()
    written = torch.isfinite(chunks.out).all(-1).all(-1)
    assert written[: 1 + 128 + 2].all()
    assert torch.isnan(chunks.out[1 + 128 + 2 :]).all()


def test_a_graph_gives_the_bits_of_the_launch_that_it_records_and_of_other_tiles() -> None:
    chunks = Chunks(CASES[1], torch.bfloat16, SIZES)
    chunks.attend()
    first = chunks.out.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chunks.call()
    chunks.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(chunks.out, first)
    # The same graph for another step: the sequences' chunks in other places.
    reordered = chunks.tiles[:, torch.randperm(chunks.tiles.shape[1], device=DEVICE)]
    chunks.tiles.copy_(reordered)
    chunks.out.fill_(float("nan"))
    graph.replay()
    assert torch.equal(chunks.out, first)


def test_many_rounds_over_the_same_buffers_give_the_same_bits() -> None:
    """Contexts of many more tiles than are under way at once."""
    case = Case(16, 8, 128, 16, False, [3000, 0])
    chunks = Chunks(case, torch.bfloat16, [1000, 4000])
    chunks.attend()
    first = chunks.out.clone()
    assert error(first, chunks.wanted()) < tolerance(torch.bfloat16)
    for _ in range(20):
        chunks.call()
        assert torch.equal(chunks.out, first)
