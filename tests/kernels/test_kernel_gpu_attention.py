"""The GPU's attention kernels against a plain computation in fp64."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from triton_device import DEVICE, DTYPES, ON_GPU, error, tolerance

from penstock.kernels.gpu.decode_attention import decode_attention, decode_workspace
from penstock.kernels.gpu.prefill_attention import QUERY_TILE, prefill_attention
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import prefix_attention, shared_prefix
from penstock.kernels.rms_norm import rms_norm_fp32, scaled_norm_weight
from penstock.kernels.rotary import RopeParameters, apply_rotary, cos_sin_table

EPS = 1e-6
MAX_POSITIONS = 4096


class Case(NamedTuple):
    heads: int
    kv_heads: int
    dim: int
    block_size: int
    norm: bool
    lengths: list[int]
    """Tokens of each sequence that the cache holds already."""


SMALL = [
    Case(2, 1, 64, 16, True, [1, 70, 0]),
    Case(4, 4, 32, 32, False, [130]),
    Case(16, 1, 32, 64, True, [15, 64]),
]
REAL = [
    Case(16, 8, 128, 16, True, [1, 15, 16, 17, 512, 1000, 2047, 3000]),
    Case(32, 8, 128, 32, False, [5, 800]),
    Case(16, 1, 64, 64, False, [1, 3000]),
    Case(8, 8, 256, 16, True, [100, 333]),
    Case(14, 2, 64, 16, False, list(range(1, 400, 3))),
]


class Paged:
    """Sequences in a paged cache whose unused places hold NaN."""

    def __init__(self, case: Case, dtype: torch.dtype, room: int) -> None:
        self.case, self.dtype = case, dtype
        generator = torch.Generator().manual_seed(1)
        self.generator = generator
        count = len(case.lengths)
        width = max(-(-(length + room) // case.block_size) for length in case.lengths)
        blocks = count * width + 1
        order = torch.randperm(blocks - 1, generator=generator) + 1
        self.table = order.view(count, width).to(torch.int32).to(DEVICE)
        shape = (blocks, case.kv_heads, case.block_size, case.dim)
        self.keys = torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)
        self.values = self.keys.clone()
        tables = cos_sin_table(case.dim, MAX_POSITIONS, RopeParameters(10_000.0), DEVICE)
        self.full_tables = tables
        half = case.dim // 2
        self.cos = tables[0][:, :half].contiguous()
        self.sin = tables[1][:, half:].contiguous()
        self.query_weight = self.rand(case.dim) if case.norm else None
        self.key_weight = self.rand(case.dim) if case.norm else None
        for index, length in enumerate(case.lengths):
            blocks, offsets = self.places(index, length)
            self.keys[blocks, :, offsets] = self.rand(length, case.kv_heads, case.dim)
            self.values[blocks, :, offsets] = self.rand(length, case.kv_heads, case.dim)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def places(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """Block and offset of a sequence's first positions."""
        position = torch.arange(length, device=DEVICE)
        size = self.case.block_size
        return self.table[index, position // size].long(), position % size

    def context(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, Hkv, D] of a sequence."""
        blocks, offsets = self.places(index, length)
        return self.keys[blocks, :, offsets], self.values[blocks, :, offsets]

    def turned(self, heads: Tensor, weight: Tensor | None, positions: Tensor) -> Tensor:
        """[N, H, D] normed, rotated and rounded, by the reference kernels."""
        if weight is not None:
            heads = rms_norm_fp32(heads, scaled_norm_weight(weight), EPS)
        cos, sin = (table[positions].unsqueeze(1) for table in self.full_tables)
        return apply_rotary(heads, cos, sin).to(self.dtype)

    def attend(self, queries: Tensor, index: int, start: int) -> Tensor:
        """queries: [N, Hq, D] turned, at positions start …; each sees those up to its own.
        [N, Hq, D] fp64."""
        count = len(queries)
        keys, values = self.context(index, start + count)
        shared = self.case.heads // self.case.kv_heads
        keys = keys.double().repeat_interleave(shared, 1)
        values = values.double().repeat_interleave(shared, 1)
        scores = torch.einsum("nhd,lhd->nhl", queries.double(), keys) * self.case.dim**-0.5
        own = torch.arange(start, start + count, device=DEVICE)[:, None, None]
        scores.masked_fill_(torch.arange(start + count, device=DEVICE) > own, -torch.inf)
        return torch.einsum("nhl,lhd->nhd", scores.softmax(-1), values)


def cases() -> list[Case]:
    return REAL + SMALL if ON_GPU else SMALL


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
        qkv, rows, position, paged.table, paged.cos, paged.sin, paged.query_weight,
        paged.key_weight, paged.keys, paged.values, out, workspace, EPS,
    )  # fmt: skip
    query = paged.turned(qkv[:count, :heads], paged.query_weight, position)
    key = paged.turned(qkv[:count, heads : heads + kv_heads], paged.key_weight, position)
    for index, length in enumerate(case.lengths):
        keys, values = paged.context(index, length + 1)
        assert error(keys[length], key[index]) < tolerance(dtype)
        assert torch.equal(values[length], qkv[index, heads + kv_heads :])
        wanted = paged.attend(query[index : index + 1], index, length)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"
    assert not out[count].any(), "a padding row holds zeros"
    assert not workspace.arrived.any(), "ready for the next launch"


SHARING = [
    (Case(4, 2, 64, 16, True, [96, 97, 200, 64, 131, 5]), 64),
    (Case(14, 2, 32, 32, False, [40, 32, 33]), 32),
]
SHARING_ON_GPU = [
    (Case(16, 8, 128, 16, True, [2064 + i for i in range(70)]), 2048),
    (Case(32, 8, 128, 16, True, [600, 512, 900, 40] * 16), 512),
    (Case(4, 4, 256, 64, False, [1000] * 5), 64),
    (Case(16, 1, 64, 64, False, [4000] * 40), 3968),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("case", "common"), SHARING + SHARING_ON_GPU if ON_GPU else SHARING, ids=str
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
    prefix_attention(
        qkv, rows, position, prefix, paged.table, paged.cos, paged.sin, paged.query_weight,
        paged.keys, paged.values, EPS,
    )  # fmt: skip
    decode_attention(
        qkv, rows, position, paged.table, paged.cos, paged.sin, paged.query_weight,
        paged.key_weight, paged.keys, paged.values, out, workspace, EPS, prefix,
    )  # fmt: skip
    query = paged.turned(qkv[:count, :heads], paged.query_weight, position)
    for index, length in enumerate(case.lengths):
        wanted = paged.attend(query[index : index + 1], index, length)
        assert error(out[index : index + 1], wanted) < tolerance(dtype), f"{length} cached"
    assert not out[count].any(), "a padding row holds zeros"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", cases()[-3:] if not ON_GPU else cases(), ids=str)
def test_prefill_attention_equals_the_plain_computation(case: Case, dtype: torch.dtype) -> None:
    """Chunks behind cached prefixes, longer and shorter than a tile."""
    lengths = case.lengths[:6]
    sizes = ([1, 130, 300, 128, 40, 257] if ON_GPU else [1, 5, 9])[: len(lengths)]
    paged = Paged(case._replace(lengths=lengths), dtype, room=max(sizes))
    heads, kv_heads, total = case.heads, case.kv_heads, sum(sizes)
    qkv = paged.rand(total, heads + 2 * kv_heads, case.dim)
    slots, positions, tiles, row = [], [], [], 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        slots += [index] * size
        positions += range(length, length + size)
        for start in range(0, size, QUERY_TILE):
            count = min(QUERY_TILE, size - start)
            tiles.append([row + start, count, index, length + start])
        row += size
    tiles.append([0, 0, 0, 0])
    on_device = [torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in (slots, positions)]
    queries = torch.empty(total, heads, case.dim, dtype=dtype, device=DEVICE)
    rope_and_cache(
        qkv, *on_device, paged.table, paged.cos, paged.sin, paged.query_weight, paged.key_weight,
        queries, paged.keys, paged.values, EPS,
    )  # fmt: skip
    out = torch.full_like(queries, float("nan"))
    layout = torch.tensor(tiles, dtype=torch.int32, device=DEVICE).t().contiguous()
    prefill_attention(queries, layout, len(tiles), paged.table, paged.keys, paged.values, out)
    wanted_queries = paged.turned(qkv[:, :heads], paged.query_weight, on_device[1])
    assert error(queries, wanted_queries) < tolerance(dtype)
    row = 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        wanted = paged.attend(wanted_queries[row : row + size], index, length)
        assert error(out[row : row + size], wanted) < tolerance(dtype), f"{size} after {length}"
        row += size
