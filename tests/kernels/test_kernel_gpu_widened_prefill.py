"""Chunks over KV memory of a byte a number on a Hopper GPU, from widened keys and values."""

from __future__ import annotations

import pytest
import torch
from support.kernels.paged_sequences import Case, tiles_of
from support.kernels.triton_device import DEVICE, ON_GPU, error, tolerance
from test_kernel_gpu_prefill_hopper import LENGTHS, SIZES
from test_kernel_gpu_quantized_cache import CODES, QuantizedPaged, on_device

from penstock.kernels.gpu.widen_cache import Contexts
from penstock.services.worker.gpu.widened_prefill import WidenedPrefill

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not ON_GPU or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a GPU of compute capability 9.0",
    ),
]
CASES = [
    *(Case(8, 4, 128, block_size, False, LENGTHS) for block_size in (8, 16, 64, 128)),
    Case(16, 2, 64, 16, False, LENGTHS),
]


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_chunks_equal_the_plain_computation_of_what_codes_stand_for(
    case: Case, dtype: torch.dtype, codes: torch.dtype
) -> None:
    ends = [start + size for start, size in zip(LENGTHS, SIZES, strict=True)]
    paged = QuantizedPaged(case._replace(lengths=ends), dtype, 0, codes)
    queries = paged.rand(sum(SIZES), case.heads, case.dim)
    caches = [paged.cache, paged.cache]
    widened = WidenedPrefill(caches, queries, paged.table, [case.dim**-0.5] * 2)
    counts = [-(-end // widened.unit) for end in ends]
    assert sum(counts) <= widened.units
    firsts = [sum(counts[:place]) for place in range(len(counts) + 1)]
    contexts = Contexts(on_device(firsts), on_device([*range(len(counts))]))
    tiles, out = tiles_of(LENGTHS, SIZES), torch.full_like(queries, float("nan"))
    for _ in range(2):  # what it finds the second time was left by the first
        widened(1, queries, tiles, tiles.shape[1], paged.table, out, contexts)
    assert out.device.type == DEVICE.type
    parts = zip(out.split(SIZES), queries.split(SIZES), strict=True)
    for index, (found, some) in enumerate(parts):
        wanted = paged.attend(some, index, LENGTHS[index])
        assert error(found, wanted) < tolerance(dtype), f"{SIZES[index]} after {LENGTHS[index]}"
