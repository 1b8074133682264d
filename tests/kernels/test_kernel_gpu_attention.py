"""The GPU's attention kernels against a plain computation in fp64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from support.kernels.paged_sequences import EPS, Case, Paged, tiles_of
from support.kernels.triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.block_pattern import BlockPattern
from penstock.kernels.gpu.attention_arguments import DecodeBatch, Scores, listed_blocks
from penstock.kernels.gpu.decode_attention import decode_attention
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.prefill_attention import prefill_attention
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import prefix_attention, shared_prefix

SMALL = [
    Case(2, 1, 64, 16, True, [1, 70, 0]),
    Case(4, 4, 32, 32, False, [130]),
    Case(16, 1, 32, 64, True, [15, 64]),
    Case(6, 3, 80, 16, True, [70, 3]),
    Case(2, 2, 16, 16, False, [70]),
]
REAL = [
    Case(16, 8, 128, 16, True, [1, 15, 16, 17, 512, 1000, 2047, 3000]),
    Case(32, 8, 128, 32, False, [5, 800]),
    Case(16, 1, 64, 64, False, [1, 3000]),
    Case(8, 8, 256, 16, True, [100, 333]),
    Case(14, 2, 64, 16, False, list(range(1, 400, 3))),
    Case(32, 32, 96, 16, False, [1, 15, 16, 17, 512, 1000, 2047, 3000]),
    Case(32, 8, 80, 16, True, [5, 2500]),
    Case(8, 4, 160, 32, False, [100, 333]),
    Case(8, 2, 112, 16, True, [1, 900]),
]


def in_short(every: list[Any], quick: list[int]) -> list[Any]:
    """All of them; those that are not named are for the long run where the interpreter computes."""
    return [
        each
        if ON_GPU or place in quick
        else pytest.param(*each if type(each) is tuple else (each,), marks=pytest.mark.slow)
        for place, each in enumerate(every)
    ]


def cases() -> list[Any]:
    return in_short(REAL + SMALL if ON_GPU else SMALL, [0, 2, 3])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_decode_attention_equals_the_plain_computation(case: Case, dtype: torch.dtype) -> None:
    paged = Paged(case, dtype, room=1)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    qkv = paged.rand(count + 1, heads + 2 * kv_heads, case.dim)
    rows = torch.tensor([*range(count), -1], dtype=torch.int32, device=DEVICE)
    position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full((count + 1, heads, case.dim), float("nan"), dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count + 1, heads, kv_heads, case.dim, DEVICE)
    decode_attention(
        qkv, DecodeBatch(rows, position, paged.table), paged.inputs, paged.cache, out, workspace,
        EPS,
    )  # fmt: skip
    query = paged.rotated(qkv[:count, :heads], paged.inputs.query_weight, position)
    key = paged.rotated(qkv[:count, heads : heads + kv_heads], paged.inputs.key_weight, position)
    for index, length in enumerate(case.lengths):
        keys, values = paged.context(index, length + 1)
        assert error(keys[length], key[index]) < tolerance(dtype)
        assert torch.equal(values[length], qkv[index, heads + kv_heads :])
        wanted = paged.attend(query[index : index + 1], index, length)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"
    assert out[count].isnan().all(), "padding is left alone"
    assert not workspace.arrived.any(), "ready for the next launch"


MADE = [
    (Case(4, 2, 32, 16, True, [1, 70, 39, 0]), Scores(0.1, window=40)),
    (Case(4, 4, 32, 32, False, [130]), Scores(32**-0.5, window=1)),
    (Case(2, 1, 64, 16, False, [15, 64]), Scores(0.3, softcap=2.0)),
    (Case(4, 1, 32, 16, False, [15, 64]), Scores(0.3, 17, 2.0)),
    (Case(4, 1, 48, 16, False, [15, 64]), Scores(0.3, 17, 2.0)),
    (Case(6, 3, 32, 16, True, [1, 70, 0]), Scores(0.3, sinks=True)),
    (Case(4, 2, 48, 16, False, [130, 33]), Scores(0.3, 17, 2.0, sinks=True)),
    (Case(4, 2, 32, 16, True, [1, 80, 39, 0]), Scores(0.3, chunk=40)),
    (Case(4, 1, 32, 16, False, [70, 31]), Scores(0.3, 50, chunk=32)),
]
MADE_ON_GPU = [
    (Case(8, 4, 256, 16, False, [1, 4000, 4095 - 300, 33]), Scores(0.0625, 2048, 50.0)),
    (Case(32, 8, 128, 16, False, [1, 2047, 3000, 33]), Scores(128**-0.5, 1024)),
    (Case(8, 4, 256, 16, False, [1000, 2047]), Scores(0.0625, 0, 50.0)),
    (Case(32, 32, 96, 16, False, [1, 2047, 3000, 33]), Scores(96**-0.5, 2047)),
    (Case(64, 8, 64, 16, False, [1, 2047, 3000, 33]), Scores(0.125, sinks=True)),
    (Case(64, 8, 64, 16, False, [1, 2047, 3000, 33]), Scores(0.125, 128, sinks=True)),
    (Case(40, 8, 128, 16, False, [1, 2047, 3000, 33]), Scores(0.125, chunk=1024)),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "made"), in_short(MADE + MADE_ON_GPU if ON_GPU else MADE, [1, 4, 5, 8]), ids=str
)
def test_windows_soft_caps_scales_and_sinks_of_decode_rows_equal_the_plain_computation(
    case: Case, made: Scores, dtype: torch.dtype
) -> None:
    paged = Paged(case, dtype, room=1)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    sinks = 2 * paged.rand(heads) if made.sinks else None
    qkv = paged.rand(count, heads + 2 * kv_heads, case.dim)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full((count, heads, case.dim), float("nan"), dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count, heads, kv_heads, case.dim, DEVICE)
    decode_attention(
        qkv, DecodeBatch(rows, position, paged.table_of_seen(made)), paged.inputs, paged.cache, out,
        workspace, EPS, scores=made, sinks=sinks,
    )  # fmt: skip
    query = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, position)
    for index, length in enumerate(case.lengths):
        wanted = paged.attend(query[index : index + 1], index, length, made, sinks)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "made"), in_short(MADE + MADE_ON_GPU if ON_GPU else MADE, [1, 4, 5, 8]), ids=str
)
def test_windows_soft_caps_scales_and_sinks_of_chunks_equal_the_plain_computation(
    case: Case, made: Scores, dtype: torch.dtype
) -> None:
    lengths = case.lengths
    sizes = ([1, 300, 257, 128] if ON_GPU else [1, 140, 9, 30])[: len(lengths)]
    paged = Paged(case, dtype, room=max(sizes))
    heads, total = case.heads, sum(sizes)
    sinks = 2 * paged.rand(heads) if made.sinks else None
    queries = paged.rand(total, heads, case.dim)
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        blocks, offsets = paged.places(index, length + size)
        for cache in (paged.keys, paged.values):
            cache[blocks, :, offsets] = paged.rand(length + size, case.kv_heads, case.dim)
    out = torch.full_like(queries, float("nan"))
    tiles = tiles_of(lengths, sizes)
    prefill_attention(
        queries, tiles, tiles.shape[1], paged.table_of_seen(made), paged.cache, out, made, sinks
    )
    row = 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        wanted = paged.attend(queries[row : row + size], index, length, made, sinks)
        assert error(out[row : row + size], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size


LISTED = [
    (Case(4, 2, 32, 16, True, [1, 170, 139, 0]), Scores(0.3, 20), BlockPattern(first=1)),
    (Case(4, 1, 32, 64, False, [400]), Scores(0.3, chunk=48), BlockPattern(1, 3)),
    (Case(6, 2, 48, 16, False, [90, 200]), Scores(0.3, 33, 2.0, sinks=True), None),
]
LISTED_ON_GPU = [
    (Case(32, 8, 128, 16, True, [1, 17, 3000]), Scores(128**-0.5, 256), BlockPattern(1, 8)),
    (Case(8, 4, 256, 16, False, [3000, 777]), Scores(0.0625, chunk=1024), None),
]
"""Blocks that are seen besides; ``None``: others in each sequence."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "made", "pattern"),
    in_short(LISTED + LISTED_ON_GPU if ON_GPU else LISTED, [1, 2]),
    ids=str,
)
def test_blocks_that_are_seen_besides_are_read_and_no_others(
    case: Case, made: Scores, pattern: BlockPattern | None, dtype: torch.dtype
) -> None:
    sizes = [1, 140, 9, 30][: len(case.lengths)]
    paged = Paged(case, dtype, room=max(sizes))
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    slots, width = paged.table.shape
    mask = np.random.default_rng(1).random((slots, width)) < 0.3
    if pattern is not None:
        mask[:] = pattern.mask(width)
    listed = listed_blocks(mask if pattern is None else mask[:1], DEVICE)
    besides = torch.from_numpy(mask).to(DEVICE)
    table = paged.table_of_seen(made, besides)
    sinks = paged.rand(heads) if made.sinks else None
    queries = paged.rand(sum(sizes), heads, case.dim)
    kept = [cache.clone() for cache in (paged.keys, paged.values)]
    for index, (length, size) in enumerate(zip(case.lengths, sizes, strict=True)):
        blocks, offsets = (each[length:] for each in paged.places(index, length + size))
        for cache in (paged.keys, paged.values):
            cache[blocks, :, offsets] = paged.rand(size, kv_heads, case.dim)
    out = torch.full_like(queries, float("nan"))
    tiles = tiles_of(case.lengths, sizes)
    prefill_attention(queries, tiles, tiles.shape[1], table, paged.cache, out, made, sinks, listed)
    row = 0
    for index, (length, size) in enumerate(zip(case.lengths, sizes, strict=True)):
        some = slice(row, row + size)
        wanted = paged.attend(queries[some], index, length, made, sinks, besides[index])
        assert error(out[some], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size
    paged.keys, paged.values = kept
    qkv = paged.rand(count, heads + 2 * kv_heads, case.dim)
    rows = torch.arange(count, dtype=torch.int32, device=DEVICE)
    position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    out = torch.full((count, heads, case.dim), float("nan"), dtype=dtype, device=DEVICE)
    decode_attention(
        qkv, DecodeBatch(rows, position, table), paged.inputs, paged.cache, out,
        decode_workspace(count, heads, kv_heads, case.dim, DEVICE), EPS, None, made, sinks, listed,
    )  # fmt: skip
    query = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, position)
    for index, length in enumerate(case.lengths):
        some = slice(index, index + 1)
        wanted = paged.attend(query[some], index, length, made, sinks, besides[index])
        assert error(out[some], wanted) < tolerance(dtype), f"{length} cached"


SHARING = [
    (Case(4, 2, 64, 16, True, [96, 97, 200, 64, 131, 5]), 64),
    (Case(14, 2, 32, 32, False, [40, 32, 33]), 32),
    (Case(64, 1, 32, 16, False, [40, 33]), 32),
    (Case(4, 2, 48, 16, True, [40, 33, 5]), 32),
]
SHARING_ON_GPU = [
    (Case(16, 8, 128, 16, True, [2064 + i for i in range(70)]), 2048),
    (Case(32, 8, 128, 16, True, [600, 512, 900, 40] * 16), 512),
    (Case(4, 4, 256, 64, False, [1000] * 5), 64),
    (Case(16, 1, 64, 64, False, [4000] * 40), 3968),
    (Case(32, 32, 96, 16, False, [1000] * 20), 512),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "common"),
    in_short(SHARING + SHARING_ON_GPU if ON_GPU else SHARING, [1, 3]),
    ids=str,
)
def test_a_shared_prefix_is_attended_as_if_each_row_had_it_alone(
    case: Case, common: int, dtype: torch.dtype
) -> None:
    paged = Paged(case, dtype, room=1)
    count, heads, kv_heads = len(case.lengths), case.heads, case.kv_heads
    members = [index for index, length in enumerate(case.lengths) if length >= common]
    paged.table[members, : common // case.block_size] = paged.table[
        members[0], : common // case.block_size
    ]
    qkv = paged.rand(count + 1, heads + 2 * kv_heads, case.dim)
    rows = torch.tensor([*range(count), -1], dtype=torch.int32, device=DEVICE)
    position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    lengths = torch.zeros(count + 1, dtype=torch.int32, device=DEVICE)
    lengths[members] = common
    leader = torch.tensor([members[-1]], dtype=torch.int32, device=DEVICE)
    prefix = shared_prefix(leader, lengths, count + 1, heads, kv_heads, case.dim)
    prefix.partial.fill_(float("nan"))
    prefix.sums.fill_(float("nan"))
    out = torch.full((count + 1, heads, case.dim), float("nan"), dtype=dtype, device=DEVICE)
    workspace = decode_workspace(count + 1, heads, kv_heads, case.dim, DEVICE)
    batch = DecodeBatch(rows, position, paged.table)
    prefix_attention(qkv, batch, prefix, paged.inputs, paged.cache, EPS)
    sinks = None if case.norm else paged.rand(heads)
    decode_attention(
        qkv, batch, paged.inputs, paged.cache, out, workspace, EPS, prefix, sinks=sinks
    )
    query = paged.rotated(qkv[:count, :heads], paged.inputs.query_weight, position)
    for index, length in enumerate(case.lengths):
        wanted = paged.attend(query[index : index + 1], index, length, sinks=sinks)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"
    assert out[count].isnan().all(), "padding is left alone"


def test_a_shared_prefix_of_more_heads_than_a_program_has_room_for_is_refused() -> None:
    case = Case(65, 1, 32, 16, False, [40, 41])
    paged = Paged(case, torch.float32, room=1)
    qkv = paged.rand(2, 67, case.dim)
    rows = torch.arange(2, dtype=torch.int32, device=DEVICE)
    lengths = torch.full((2,), 32, dtype=torch.int32, device=DEVICE)
    position = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    prefix = shared_prefix(rows[:1], lengths, 2, 65, 1, case.dim)
    batch = DecodeBatch(rows, position, paged.table)
    with pytest.raises(ValueError, match="up to 64 heads for a KV head, not 65"):
        prefix_attention(qkv, batch, prefix, paged.inputs, paged.cache, EPS)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases(), ids=str)
def test_prefill_attention_equals_the_plain_computation(case: Case, dtype: torch.dtype) -> None:
    """Chunks behind cached prefixes, longer and shorter than a tile."""
    lengths = case.lengths[:6]
    sizes = ([1, 130, 300, 128, 40, 257] if ON_GPU else [1, 5, 9])[: len(lengths)]
    paged = Paged(case._replace(lengths=lengths), dtype, room=max(sizes))
    heads, kv_heads, total = case.heads, case.kv_heads, sum(sizes)
    qkv = paged.rand(total, heads + 2 * kv_heads, case.dim)
    slots, positions = [], []
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        slots += [index] * size
        positions += range(length, length + size)
    on_device = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)]
    queries = torch.empty(total, heads, case.dim, dtype=dtype, device=DEVICE)
    rope_and_cache(
        qkv, *on_device, paged.table, paged.inputs, queries, paged.cache, EPS,
    )  # fmt: skip
    out = torch.full_like(queries, float("nan"))
    tiles = tiles_of(lengths, sizes)
    prefill_attention(queries, tiles, tiles.shape[1], paged.table, paged.cache, out)
    wanted_queries = paged.rotated(qkv[:, :heads], paged.inputs.query_weight, on_device[1])
    assert error(queries, wanted_queries) < tolerance(dtype)
    row = 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        wanted = paged.attend(wanted_queries[row : row + size], index, length)
        assert error(out[row : row + size], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size
