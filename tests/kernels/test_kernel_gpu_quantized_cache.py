"""The GPU's attention kernels over caches of a byte a number, against a plain computation of what
codes and scales stand for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.paged_sequences import EPS, Case, Paged, tiles_of
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance
from torch import Tensor

from penstock.kernels import quantized_cache
from penstock.kernels.block_pattern import BlockPattern
from penstock.kernels.gpu import decode_attention as decode_kernel
from penstock.kernels.gpu import decode_shapes
from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    DecodeBatch,
    LayerCache,
    Scores,
    layer_cache,
    listed_blocks,
)
from penstock.kernels.gpu.decode_attention import decode_attention
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.prefill_attention import prefill_attention
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import prefix_attention, shared_prefix
from penstock.kernels.gpu.widen_cache import Contexts, unit_for, wide_cache, widen_cache

CODES = [torch.int8, torch.float8_e4m3fn]
ROUNDED = {torch.int8: 0.012, torch.float8_e4m3fn: 0.04 if ON_GPU else 0.08}
"""Relative error that rounding to codes explains; the interpreter truncates to e4m3."""
ALIKE = {torch.int8: 0.003, torch.float8_e4m3fn: 0.01 if ON_GPU else 0.08}
"""Likewise, of codes of which some lie between two."""
SMALL = [
    Case(4, 2, 32, 16, True, [1, 70, 0]),
    Case(6, 2, 80, 16, False, [70, 3]),
]
REAL = [
    Case(16, 8, 128, 16, True, [1, 15, 16, 17, 512, 1000, 2047, 3000]),
    Case(32, 8, 128, 32, False, [5, 800]),
    Case(16, 1, 64, 64, False, [1, 3000]),
    Case(8, 8, 256, 16, True, [100, 333]),
    Case(14, 2, 64, 16, False, list(range(1, 400, 3))),
    Case(32, 32, 96, 8, False, [1, 15, 16, 17, 512, 1000, 2047, 3000]),
    Case(8, 4, 160, 32, False, [100, 333]),
]
MADE = [
    (Case(4, 2, 48, 16, False, [130, 33]), Scores(0.3, 17, 2.0, sinks=True), BlockPattern(1, 3)),
]
MADE_ON_GPU = [
    (Case(8, 4, 256, 16, False, [1, 3900, 33]), Scores(0.0625, 2048, 50.0), None),
    (Case(32, 8, 128, 16, True, [1, 17, 3000]), Scores(128**-0.5, 256), BlockPattern(1, 8)),
    (Case(64, 8, 64, 16, False, [1, 2047, 3000]), Scores(0.125, 128, sinks=True), None),
]
SHARING = [(Case(4, 2, 48, 16, True, [40, 33, 5]), 32)]
SHARING_ON_GPU = [
    (Case(16, 8, 128, 16, True, [2064 + i for i in range(70)]), 2048),
    (Case(32, 8, 128, 16, True, [600, 512, 900, 40] * 16), 512),
    (Case(16, 1, 64, 64, False, [3900] * 40), 3840),
]


class QuantizedPaged(Paged):
    """What ``Paged`` has, quantized by the reference; scales of unused places are NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, room: int, codes: torch.dtype) -> None:
        super().__init__(case, dtype, room)
        shape = (*self.keys.shape[:3], quantized_cache.columns(case.dim, codes))
        self.packed = []
        for plain in (self.keys, self.values):
            cache = torch.full(shape, 0x7F, dtype=torch.int8, device=DEVICE).view(codes)
            of_codes, of_scales = quantized_cache.parts(cache)
            made, scales = quantized_cache.quantize(plain, codes)
            of_codes.view(torch.int8).copy_(made.view(torch.int8))
            of_scales.copy_(scales)
            self.packed.append(cache)

    @property
    def cache(self) -> LayerCache:
        return layer_cache(*self.packed)

    def context(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        blocks, offsets = self.places(index, length)
        keys, values = (
            quantized_cache.dequantize(*quantized_cache.parts(cache))[blocks, :, offsets]
            for cache in self.packed
        )
        return keys, values


def on_device(numbers: list[int]) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


def of_both(every: list[Any], on_gpu: list[Any]) -> list[Any]:
    return every + on_gpu if ON_GPU else every


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", of_both(SMALL, REAL), ids=str)
def test_decode_rows_write_codes_and_attend_to_what_codes_stand_for(
    case: Case, dtype: torch.dtype, codes: torch.dtype
) -> None:
    paged = QuantizedPaged(case, dtype, 1, codes)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    qkv = paged.rand(count + 1, heads + 2 * kv_heads, case.dim)
    batch = DecodeBatch(on_device([*range(count), -1]), on_device(case.lengths), paged.table)
    out = torch.full((count + 1, heads, case.dim), float("nan"), dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count + 1, heads, kv_heads, case.dim, DEVICE)
    decode_attention(qkv, batch, paged.inputs, paged.cache, out, workspace, EPS)
    position = batch.last_position
    query = paged.rotated(qkv[:count, :heads], paged.inputs.query_weight, position)
    key = paged.rotated(qkv[:count, heads : heads + kv_heads], paged.inputs.key_weight, position)
    for index, length in enumerate(case.lengths):
        keys, values = paged.context(index, length + 1)
        assert error(keys[length], key[index]) < ROUNDED[codes]
        assert error(values[length], qkv[index, heads + kv_heads :]) < ROUNDED[codes]
        wanted = paged.attend(query[index : index + 1], index, length)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"
    assert out[count].isnan().all(), "padding is left alone"


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize(
    "case",
    of_both(
        [Case(6, 2, 32, 16, True, [300, 70, 0])],
        [
            Case(32, 8, 128, 16, True, [4000]),
            Case(16, 8, 128, 16, True, [1, 4000, 130, 2047]),
            Case(16, 1, 64, 64, False, [3000] * 8),
        ],
    ),
    ids=str,
)
def test_parts_of_many_splits_are_combined_in_groups(
    case: Case, codes: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice, over longer and then shorter contexts: counters are zero again behind a launch."""
    dtype = torch.bfloat16 if ON_GPU else torch.float32
    shape = decode_shapes.Shape(32 if ON_GPU else 16, 1, 3, 128, 8)
    monkeypatch.setattr(decode_kernel, "shape_for", lambda *_, **__: shape)
    paged = QuantizedPaged(case, dtype, 1, codes)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    qkv = paged.rand(count, heads + 2 * kv_heads, case.dim)
    workspace = decode_workspace(count, heads, kv_heads, case.dim, DEVICE)
    for lengths in (case.lengths, [length // 2 for length in case.lengths]):
        batch = DecodeBatch(on_device([*range(count)]), on_device(lengths), paged.table)
        out = torch.empty(count, heads, case.dim, dtype=dtype, device=DEVICE)
        decode_attention(qkv, batch, paged.inputs, paged.cache, out, workspace, EPS)
        assert not workspace.arrived.any()
        query = paged.rotated(
            qkv[:, :heads], paged.inputs.query_weight, batch.last_position
        )  # fmt: skip
        for index, length in enumerate(lengths):
            some = slice(index, index + 1)
            wanted = paged.attend(query[some], index, length)
            assert error(out[some], wanted) < tolerance(dtype), f"{length} cached"


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", of_both(SMALL, REAL), ids=str)
def test_chunks_write_the_references_codes_and_attend_to_what_they_stand_for(
    case: Case, dtype: torch.dtype, codes: torch.dtype
) -> None:
    lengths = case.lengths[:6]
    sizes = ([1, 130, 300, 128, 40, 257] if ON_GPU else [1, 5, 9])[: len(lengths)]
    paged = QuantizedPaged(case._replace(lengths=lengths), dtype, max(sizes), codes)
    heads, kv_heads, total = case.heads, case.kv_heads, sum(sizes)
    qkv = paged.rand(total, heads + 2 * kv_heads, case.dim)
    slots, positions = [], []
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        slots += [index] * size
        positions += range(length, length + size)
    queries = torch.empty(total, heads, case.dim, dtype=dtype, device=DEVICE)
    at = on_device(positions)
    rope_and_cache(qkv, on_device(slots), at, paged.table, paged.inputs, queries, paged.cache, EPS)
    out = torch.full_like(queries, float("nan"))
    tiles = tiles_of(lengths, sizes)
    prefill_attention(queries, tiles, tiles.shape[1], paged.table, paged.cache, out)
    key = paged.rotated(qkv[:, heads : heads + kv_heads], paged.inputs.key_weight, at)
    row = 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        some = slice(row, row + size)
        for found, plain in zip(
            paged.context(index, length + size), (key, qkv[:, heads + kv_heads :]), strict=True
        ):
            made = quantized_cache.dequantize(*quantized_cache.quantize(plain[some], codes))
            assert error(found[length:], made) < ALIKE[codes]
        wanted = paged.attend(queries[some], index, length)
        assert error(out[some], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "made", "pattern"), of_both(MADE, MADE_ON_GPU), ids=str)
def test_windows_caps_sinks_and_listed_blocks_are_those_of_plain_caches(
    case: Case,
    made: Scores,
    pattern: BlockPattern | None,
    dtype: torch.dtype,
    codes: torch.dtype,
) -> None:
    sizes = [1, 140, 9][: len(case.lengths)]
    paged = QuantizedPaged(case, dtype, max(sizes), codes)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    width = paged.table.shape[1]
    mask = np.zeros((1, width), np.bool_) if pattern is None else pattern.mask(width)[None]
    besides = torch.from_numpy(mask[0]).to(DEVICE)
    listed = NOTHING_LISTED if pattern is None else listed_blocks(mask, DEVICE)
    table = paged.table_of_seen(made, besides[None].expand(count, -1))
    sinks = paged.rand(heads) if made.sinks else None
    qkv = paged.rand(count, heads + 2 * kv_heads, case.dim)
    batch = DecodeBatch(on_device([*range(count)]), on_device(case.lengths), table)
    out = torch.empty(count, heads, case.dim, dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count, heads, kv_heads, case.dim, DEVICE)
    decode_attention(
        qkv, batch, paged.inputs, paged.cache, out, workspace, EPS, None, made, sinks, listed
    )
    query = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, batch.last_position)
    for index, length in enumerate(case.lengths):
        some = slice(index, index + 1)
        wanted = paged.attend(query[some], index, length, made, sinks, besides)
        assert error(out[some], wanted) < tolerance(dtype), f"{length} cached"
    slots = [index for index, size in enumerate(sizes) for _ in range(size)]
    starts = zip(case.lengths, sizes, strict=True)
    positions = [start + place for start, size in starts for place in range(size)]
    qkv = paged.rand(len(slots), heads + 2 * kv_heads, case.dim)
    queries = torch.empty(len(slots), heads, case.dim, dtype=dtype, device=DEVICE)
    rope_and_cache(
        qkv, on_device(slots), on_device(positions), table, paged.inputs, queries, paged.cache, EPS
    )
    out, tiles = torch.empty_like(queries), tiles_of(case.lengths, sizes)
    prefill_attention(queries, tiles, tiles.shape[1], table, paged.cache, out, made, sinks, listed)
    row = 0
    for index, (length, size) in enumerate(zip(case.lengths, sizes, strict=True)):
        some = slice(row, row + size)
        wanted = paged.attend(queries[some], index, length, made, sinks, besides)
        assert error(out[some], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("case", "common"), of_both(SHARING, SHARING_ON_GPU), ids=str)
def test_rows_behind_a_shared_prefix_attend_as_if_each_had_it_alone(
    case: Case, common: int, dtype: torch.dtype, codes: torch.dtype
) -> None:
    paged = QuantizedPaged(case, dtype, 1, codes)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    members = [index for index, length in enumerate(case.lengths) if length >= common]
    blocks = common // case.block_size
    paged.table[members, :blocks] = paged.table[members[0], :blocks]
    qkv = paged.rand(count, heads + 2 * kv_heads, case.dim)
    lengths = on_device([common if index in members else 0 for index in range(count)])
    leader = on_device([members[-1]])
    prefix = shared_prefix(leader, lengths, count, heads, kv_heads, case.dim)
    out = torch.empty(count, heads, case.dim, dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count, heads, kv_heads, case.dim, DEVICE)
    batch = DecodeBatch(on_device([*range(count)]), on_device(case.lengths), paged.table)
    prefix_attention(qkv, batch, prefix, paged.inputs, paged.cache, EPS)
    decode_attention(qkv, batch, paged.inputs, paged.cache, out, workspace, EPS, prefix)
    query = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, batch.last_position)
    for index, length in enumerate(case.lengths):
        wanted = paged.attend(query[index : index + 1], index, length)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_nan_or_an_infinity_is_not_lost(codes: torch.dtype) -> None:
    case = Case(2, 2, 32, 16, False, [3, 4])
    paged = QuantizedPaged(case, torch.float32, 1, codes)
    qkv = paged.rand(2, 6, 32)
    qkv[0, 4, 5], qkv[1, 5, 7] = torch.nan, torch.inf
    batch = DecodeBatch(on_device([0, 1]), on_device(case.lengths), paged.table)
    out, queries = torch.empty(2, 2, 2, 32, device=DEVICE)
    workspace = decode_workspace(2, 2, 2, 32, DEVICE)
    decode_attention(qkv, batch, paged.inputs, paged.cache, out, workspace, EPS)
    rope_and_cache(
        qkv, batch.rows, batch.last_position, paged.table, paged.inputs, queries, paged.cache, EPS
    )
    for index, head in ((0, 0), (1, 1)):
        assert out[index, head].isnan().any()
        assert out[index, 1 - head].isfinite().all()
        values = paged.context(index, case.lengths[index] + 1)[1][-1]
        assert values[head].isnan().any()
        assert values[1 - head].isfinite().all()


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", of_both(SMALL, REAL), ids=str)
def test_widened_keys_and_values_are_what_codes_stand_for_each_sequence_behind_the_other(
    case: Case, dtype: torch.dtype, codes: torch.dtype
) -> None:
    paged = QuantizedPaged(case, dtype, 1, codes)
    unit, most = unit_for(case.block_size), len(case.lengths)
    chosen = [index for index, length in enumerate(case.lengths) if length][::-1]
    counts = [-(-case.lengths[index] // unit) for index in chosen]
    firsts = [sum(counts[:place]) for place in range(len(counts))]
    total = sum(counts)
    contexts = Contexts(
        on_device(firsts + [total] * (most + 1 - len(firsts))),
        on_device(chosen + [0] * (most - len(chosen))),
    )
    wide = wide_cache(total, case.kv_heads, case.block_size, case.dim, paged.table, dtype)
    widen_cache(contexts, paged.table, paged.cache, wide)
    for index in chosen:
        length = case.lengths[index]
        place = torch.arange(length, device=DEVICE)
        blocks = wide.table[index].long()[place // case.block_size]
        for found, wanted in zip(wide[:2], paged.context(index, length), strict=True):
            assert torch.equal(found[blocks, :, place % case.block_size], wanted.to(dtype))
