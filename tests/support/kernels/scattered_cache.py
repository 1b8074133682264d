"""Sequences whose K and V lie scattered over a paged cache, and what attention gives."""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.attention import KV_TILE, ReferenceAttention, paged_attention
from penstock.kernels.attention_backend import (
    AttentionBackend,
    CacheShape,
    PlannedBatch,
    QuerySpans,
)
from penstock.kernels.block_pattern import NO_BLOCKS, BlockPattern

CPU = torch.device("cpu")


class Scattered:
    """Sequences with random Q, K and V, their K and V scattered over a paged cache.

    What is not written is NaN in the key cache, if the backend allows that, and huge in the value
    cache, as if blocks held another sequence's remains; V must be finite (see ``clear_blocks``).
    """

    def __init__(
        self,
        lengths: list[int],
        heads: int,
        kv_heads: int,
        dim: int,
        block_size: int,
        dtype: torch.dtype = torch.float32,
        exact: bool = True,
        backend: AttentionBackend | None = None,
        device: torch.device = CPU,
        window: int = 0,
        softcap: float = 0.0,
        sinks: bool = False,
        chunk: int = 0,
        besides: BlockPattern = NO_BLOCKS,
    ) -> None:
        self.device = device
        self.backend = backend or ReferenceAttention()
        generator = torch.Generator().manual_seed(sum(lengths) + heads + dim)
        per = [-(-length // block_size) for length in lengths]
        blocks = torch.randperm(sum(per) + 3, generator=generator).tolist()
        self.shape = CacheShape(
            kv_heads, len(blocks), block_size, dim, heads, dtype, exact, window, softcap, chunk
        )
        unused = 1e4 if self.backend.finite_keys else torch.nan
        self.key_cache = torch.full(self.shape[:4], unused, dtype=dtype)
        huge = 6e4 if dtype == torch.float16 else 1e30
        self.value_cache = torch.full(self.shape[:4], huge, dtype=dtype)
        longest = -(-max(lengths) // KV_TILE) * -(-KV_TILE // block_size)
        self.tables = np.zeros((len(lengths), longest), np.int64)
        self.sinks = 2 * torch.randn(heads, generator=generator) if sinks else None
        width = self.tables.shape[1]
        self.besides = np.tile(besides.mask(width), (len(lengths), 1)) if any(besides) else None
        """[sequences, W], may be changed."""
        self.query, self.key, self.value = [], [], []
        for index, length in enumerate(lengths):
            q, k, v = (
                torch.randn(length, count, dim, generator=generator).to(dtype)
                for count in (heads, kv_heads, kv_heads)
            )
            mine = [blocks.pop() for _ in range(per[index])]
            self.tables[index, : len(mine)] = mine
            for position in range(length):
                block, offset = mine[position // block_size], position % block_size
                self.key_cache[:, block, offset] = k[position]
                self.value_cache[:, block, offset] = v[position]
            self.query.append(q)
            self.key.append(k)
            self.value.append(v)
        self.key_cache, self.value_cache = self.key_cache.to(device), self.value_cache.to(device)

    def exact(self, sequence: int, position: int) -> torch.Tensor:
        """[Hq, D] in float64."""
        query = self.query[sequence][position].double()
        heads, dim = query.shape
        shared = heads // self.shape.num_kv_heads
        own = np.arange(position + 1)
        visible = own >= self.shape.first_seen(np.array(position))
        if self.besides is not None:
            visible |= self.besides[sequence, own // self.shape.block_size]
        seen = torch.from_numpy(np.flatnonzero(visible))
        out = []
        for head in range(heads):
            k = self.key[sequence][seen, head // shared].double()
            v = self.value[sequence][seen, head // shared].double()
            scores = k @ query[head] / dim**0.5
            if self.shape.softcap:
                scores = self.shape.softcap * torch.tanh(scores / self.shape.softcap)
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[head : head + 1].double()))
            weights = torch.softmax(scores, 0)[: len(v)]
            out.append(weights @ v)
        return torch.stack(out)

    def attend(self, spans: list[tuple[int, int, int]]) -> list[torch.Tensor]:
        """One step over spans (sequence, start, count): [count, Hq * D] for each."""
        query = torch.cat([self.query[s][start : start + n] for s, start, n in spans])
        query = query.to(self.device)
        sequences, starts, counts = np.array(spans).T
        rows = np.cumsum(counts) - counts
        batches: list[PlannedBatch] = []
        for some in (counts == 1, counts > 1):
            if some.any():
                count = counts[some] if counts[some].max() > 1 else None
                tables = self.tables[sequences[some]]
                chosen = None if self.besides is None else self.besides[sequences[some]]
                part = QuerySpans(rows[some], starts[some], count, tables, chosen)
                batches += self.backend.plan(part, self.shape, self.device)
        scale = self.shape.head_dim**-0.5
        caches = self.key_cache, self.value_cache
        out = paged_attention(query, *caches, batches, scale, self.sinks)
        return list(out.cpu().split([count for _, _, count in spans]))
