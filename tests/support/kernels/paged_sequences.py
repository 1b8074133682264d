"""Sequences in a paged cache, and what attention over them gives, for the kernels' tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from support.kernels.triton_device import DEVICE
from torch import Tensor

from penstock.kernels.gpu.attention_arguments import HeadInputs, LayerCache, Scores
from penstock.kernels.gpu.prefill_attention import QUERY_TILE
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
        self.inputs = HeadInputs(
            tables[0][:, :half].contiguous(),
            tables[1][:, half:].contiguous(),
            self.rand(case.dim) if case.norm else None,
            self.rand(case.dim) if case.norm else None,
        )
        for index, length in enumerate(case.lengths):
            blocks, offsets = self.places(index, length)
            self.keys[blocks, :, offsets] = self.rand(length, case.kv_heads, case.dim)
            self.values[blocks, :, offsets] = self.rand(length, case.kv_heads, case.dim)

    @property
    def cache(self) -> LayerCache:
        return LayerCache(self.keys, self.values)

    def rand(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator).to(self.dtype).to(DEVICE)

    def places(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """Block and offset of a sequence's first positions."""
        position = torch.arange(length, device=DEVICE)
        size = self.case.block_size
        return self.table[index, position // size].long(), position % size

    def table_of_seen(self, made: Scores, besides: Tensor | None = None) -> Tensor:
        """The table of sequences that go on at their lengths; in place of blocks that nothing sees
        from there on stands one that holds NaN. besides: [sequences, W], see ``ListedBlocks``."""
        table = self.table.clone()
        for index, length in enumerate(self.case.lengths):
            first = max(0, length + 1 - made.window) if made.window else 0
            if made.chunk:
                first = max(first, length // made.chunk * made.chunk)
            unseen = torch.arange(table.shape[1], device=DEVICE) < first // self.case.block_size
            if besides is not None:
                unseen &= ~besides[index]
            table[index, unseen] = 0
        return table

    def context(self, index: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values [length, Hkv, D] of a sequence."""
        blocks, offsets = self.places(index, length)
        return self.keys[blocks, :, offsets], self.values[blocks, :, offsets]

    def rotated(self, heads: Tensor, weight: Tensor | None, positions: Tensor) -> Tensor:
        """[N, H, D] normed, rotated and rounded, by the reference kernels."""
        if weight is not None:
            heads = rms_norm_fp32(heads, scaled_norm_weight(weight), EPS)
        cos, sin = (table[positions].unsqueeze(1) for table in self.full_tables)
        return apply_rotary(heads, cos, sin).to(self.dtype)

    def attend(
        self,
        queries: Tensor,
        index: int,
        start: int,
        made: Scores | None = None,
        sinks: Tensor | None = None,
        besides: Tensor | None = None,
    ) -> Tensor:
        """queries: [N, Hq, D] rotated, at positions start …; each sees those up to its own; made:
        how scores are, by default scaled by 1 / sqrt(D); sinks: [Hq]; besides: [W].
        [N, Hq, D] fp64."""
        made = made or Scores(self.case.dim**-0.5)
        count = len(queries)
        keys, values = self.context(index, start + count)
        shared = self.case.heads // self.case.kv_heads
        keys = keys.double().repeat_interleave(shared, 1)
        values = values.double().repeat_interleave(shared, 1)
        scores = torch.einsum("nhd,lhd->nhl", queries.double(), keys) * made.scale
        if made.softcap:
            scores = made.softcap * torch.tanh(scores / made.softcap)
        own = torch.arange(start, start + count, device=DEVICE)[:, None, None]
        position = torch.arange(start + count, device=DEVICE)
        ahead = torch.zeros(count, 1, start + count, dtype=torch.bool, device=DEVICE)
        if made.window:
            ahead |= position <= own - made.window
        if made.chunk:
            ahead |= position // made.chunk < own // made.chunk
        if besides is not None:
            ahead &= ~besides[position // self.case.block_size]
        scores.masked_fill_(ahead | (position > own), -torch.inf)
        if sinks is not None:
            sink = sinks.double().view(1, -1, 1).expand(count, -1, -1)
            scores = torch.cat((scores, sink), -1)
        weights = scores.softmax(-1)[..., : start + count]
        return torch.einsum("nhl,lhd->nhd", weights, values)


def tiles_of(lengths: list[int], sizes: list[int]) -> Tensor:
    """[4, T] for chunks of ``sizes`` tokens behind ``lengths`` cached ones, rows in that order;
    the last tile is empty."""
    tiles, row = [], 0
    for index, (length, size) in enumerate(zip(lengths, sizes, strict=True)):
        for start in range(0, size, QUERY_TILE):
            count = min(QUERY_TILE, size - start)
            tiles.append([row + start, count, index, length + start])
        row += size
    tiles.append([0, 0, 0, 0])
    return torch.tensor(tiles, dtype=torch.int32, device=DEVICE).t().contiguous()
