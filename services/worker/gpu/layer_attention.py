"""Attention of all layers over the paged KV cache of a CUDA device, with the kernels chosen once.

Whatever computes the layers writes queries, keys and values of a step's rows into one buffer and
reads what attention gives from another; both stay where they are, so that graphs stay valid.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.kernels.cache_kinds import KVCacheKind
from penstock.kernels.gpu.attention_arguments import (
    NOTHING_LISTED,
    DecodeBatch,
    HeadInputs,
    ListedBlocks,
    Scores,
    listed_blocks,
)
from penstock.kernels.gpu.decode_workspace import decode_workspace
from penstock.kernels.gpu.rope_cache import rope_and_cache
from penstock.kernels.gpu.shared_prefix import shared_prefix
from penstock.kernels.quantized_cache import cache_type
from penstock.services.worker.gpu.attention_choice import (
    TritonDecodeAttention,
    TritonPrefillAttention,
    choose_decode_attention,
    choose_prefill_attention,
    choose_prefix_attention,
)
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.gpu.drafted_rows import DraftedRows, StepRows
from penstock.services.worker.gpu.kv_pool import KVPool
from penstock.services.worker.gpu.side_stream import SideStream
from penstock.services.worker.gpu.widened_prefill import choose_widened_prefill
from penstock.services.worker.layer_groups import LayerGroups, group_layers
from penstock.services.worker.models.specification import CacheSpecification


class AttentionRows(NamedTuple):
    """What attention reads and writes of the rows of the largest step."""

    qkv: Tensor
    """[T, Hq + 2 Hkv, D]: queries, keys and values, not yet normed or rotated."""
    query: Tensor
    """[T, Hq, D]: rotated queries of chunk rows."""
    output: Tensor
    """[T, Hq, D]: what attention gives; finite from the start, for rows that are padding."""


class LayerAttention:
    """The KV memory of all layers, which have the same heads, and the kernels that attend. A block
    holds as many layers as the largest group has."""

    def __init__(
        self,
        state: BatchState,
        rows: AttentionRows,
        heads: Sequence[HeadInputs],
        caches: Sequence[CacheSpecification],
        num_blocks: int,
        block_size: int,
        eps: float,
        unfit: str = "",
        grouped: LayerGroups | None = None,
        kind: KVCacheKind = "auto",
        kv_memory: Tensor | None = None,
    ) -> None:
        """heads, caches: of each layer; eps: of the norms of heads; unfit: why no kernel for Hopper
        can norm and rotate them; grouped: the layers, where they are not grouped by themselves
        alone; kind: of KV memory; kv_memory: see ``KVPool``.

        Raises ``ValueError`` where the state's block tables are not those of the caches' groups.
        """
        self._state, self._rows, self._heads, self._eps = state, rows, heads, eps
        _, num_heads, dim = rows.query.shape
        kv_heads = (rows.qkv.shape[1] - num_heads) // 2
        device = rows.qkv.device
        grouped = grouped or group_layers(caches)
        if len(state.tables) != max(1, len(grouped.groups)):
            raise ValueError("the capacity is not that of the model's groups of layers")
        self.pool = KVPool(
            num_blocks, grouped.layers, kv_heads, block_size, dim,
            cache_type(kind, rows.qkv.dtype), device, kv_memory,
        )  # fmt: skip
        """Layers of several groups share a place in it, each in blocks of its own."""
        state.pages = self.pool.pages
        self._caches = [self.pool.layer(place) for _, place in grouped.places]
        self._groups = [group for group, _ in grouped.places]
        self._tables = [state.tables[group] for group in self._groups]
        self._scores = [scores_of(each) for each in caches]
        width = state.tables[0].shape[1]
        self._listed = [_listed(each, width, device) for each in caches]
        self._plain = [each.plain for each in self._scores]
        self._side = SideStream(device)
        self._choose(unfit)

    def _choose(self, unfit: str) -> None:
        """Choose the kernels. unfit: see ``__init__``."""
        state, rows, scores = self._state, self._rows, self._scores
        _, num_heads, dim = rows.query.shape
        kv_heads = (rows.qkv.shape[1] - num_heads) // 2
        slots, device = len(state.rows), rows.qkv.device
        of_layers = [cache.keys for cache in self._caches], [cache.values for cache in self._caches]
        shared = shared_prefix(
            state.shared_slot, state.shared_length, slots, num_heads, kv_heads, dim
        )
        split = decode_workspace(slots, num_heads, kv_heads, dim, device)
        self._triton = TritonDecodeAttention(*of_layers, split, self._eps, shared, scores)
        self._triton_prefill = TritonPrefillAttention(*of_layers, scores)
        norm = any(heads.query_weight is not None for heads in self._heads)
        self.decode = choose_decode_attention(
            *of_layers, num_heads, slots, norm, self._eps, self._triton, shared, scores, unfit
        )
        self.prefix = choose_prefix_attention(
            *of_layers, num_heads, norm, self._eps, shared, scores, unfit
        )
        self.prefill = choose_prefill_attention(*of_layers, rows.query, scores)
        self.widened = choose_widened_prefill(self._caches, rows.query, state.tables[0], scores)
        """Chunks over quantized KV memory are attended to like this where a step has room."""
        self.least_rows = self.decode.kernels.least_rows
        """The chosen attention runs from so many decode rows on, the Triton kernel below."""

    @property
    def summary(self) -> str:
        prefill = self.prefill.summary
        if self.widened.kernels is not None:
            prefill = f"{self.widened.summary}, from widened keys and values"
        return (
            f"prefill attention by the {prefill}; "
            f"decode attention by the {self.decode.summary}; "
            f"that over shared prefixes by the {self.prefix.summary}"
        )

    @property
    def widened_room(self) -> tuple[int, int]:
        """Positions that a chunk's context is filled up to where it is widened, and how many times
        as many there is room for; 0: none is."""
        widened = self.widened.kernels
        return (0, 0) if widened is None else (widened.unit, widened.units)

    @property
    def shares_prefixes(self) -> bool:
        """Whether a kernel can read a prefix once for all rows that share it."""
        return self.prefix.kernels is not None

    def plan(self, num_decode: int, shared: bool) -> None:
        """Plan the attention of a step's decode rows, before all else: what the plan reads, rows
        and positions, changes between steps only, and so no layer's attention waits to read it."""
        if num_decode >= self.least_rows:
            self.decode.kernels.plan(self._batch(0, num_decode), shared)

    def attend(
        self,
        layer: int,
        rows: int,
        num_decode: int,
        chunks: StepRows | None,
        shared: bool,
        sinks: Tensor | None = None,
    ) -> None:
        """Write K and V of the first ``rows`` rows into a layer's cache and attend.

        Decode rows and chunk rows side by side: those read memory, these multiply. chunks: the
        step's chunk rows, or all its rows where it has drafts; ``None`` when all are decode rows;
        shared: read the prefix that the state
        names as shared once; only where this ``shares_prefixes``; sinks: [Hq], where the layer has
        them. Of a chunk's rows in the last layer those alone are computed that are read.
        """
        decode = partial(self._attend_decode, layer, num_decode, shared, sinks)
        if isinstance(chunks, DraftedRows):
            self._attend_drafted(layer, rows, chunks, sinks)
        elif chunks is None:
            decode()
        elif not num_decode:
            self._attend_chunks(layer, rows, chunks, sinks)
        else:
            self._side.run(decode, partial(self._attend_chunks, layer, rows, chunks, sinks))

    def _attend_decode(
        self, layer: int, num_decode: int, shared: bool, sinks: Tensor | None
    ) -> None:
        batch, heads = self._batch(layer, num_decode), self._heads[layer]
        qkv = self._rows.qkv[:num_decode]
        if shared:
            if self.prefix.kernels is None:
                raise ValueError(f"no kernel reads shared prefixes: {self.prefix.reason}")
            self.prefix.kernels(layer, qkv, batch, heads)
        output = self._rows.output[:num_decode]
        if self._plain[layer] and num_decode >= self.least_rows:
            self.decode.kernels(layer, qkv, batch, heads, output, shared)
        else:
            self._triton(layer, qkv, batch, heads, output, shared, sinks, self._listed[layer])

    def _attend_drafted(
        self, layer: int, rows: int, drafted: DraftedRows, sinks: Tensor | None
    ) -> None:
        """Rows of a slot attend to those ahead of them, too: so K and V of all are written first.
        Not by a kernel for Hopper, which reads the cache before the kernel ahead of it is over."""
        placed, qkv, heads = drafted.placed, self._rows.qkv[:rows], self._heads[layer]
        rope_and_cache(
            qkv, placed.slots[:rows], placed.positions[:rows], self._tables[layer], heads,
            self._rows.query[:rows], self._caches[layer], self._eps,
        )  # fmt: skip
        table = placed.tables[self._groups[layer]]
        batch = DecodeBatch(placed.own[:rows], placed.positions, table)
        output = self._rows.output[:rows]
        self._triton(layer, qkv, batch, heads, output, False, sinks, self._listed[layer])

    def _batch(self, layer: int, num_decode: int) -> DecodeBatch:
        state = self._state
        return DecodeBatch(state.rows[:num_decode], state.position, self._tables[layer])

    def _attend_chunks(
        self, layer: int, rows: int, chunks: ChunkRows, sinks: Tensor | None
    ) -> None:
        table = self._tables[layer]
        last = layer == len(self._heads) - 1
        rope_and_cache(
            self._rows.qkv[:rows], chunks.slots[:rows], chunks.positions[:rows], table,
            self._heads[layer], self._rows.query[:rows], self._caches[layer], self._eps,
        )  # fmt: skip
        tiles = chunks.last_tiles if last else chunks.tiles
        step = self._rows.query[:rows], tiles, chunks.num_tiles, table, self._rows.output[:rows]
        widened = self.widened.kernels
        if widened is not None and self._plain[layer] and chunks.fit:
            widened(layer, *step, chunks.contexts)
        elif self._plain[layer]:
            self.prefill.kernels(layer, *step)
        else:
            self._triton_prefill(layer, *step, sinks, self._listed[layer])


def _listed(cache: CacheSpecification, width: int, device: torch.device) -> ListedBlocks:
    """width: entries of a block table."""
    if not any(cache.besides):
        return NOTHING_LISTED
    return listed_blocks(cache.besides.mask(width)[None], device)


def scores_of(cache: CacheSpecification) -> Scores:
    """How a layer's scores are made, for the kernels."""
    return Scores(cache.score_scale, cache.window, cache.softcap, cache.sinks, cache.chunk)
