"""From slots and a planned step to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from penstock.kernels.attention import paged_attention
from penstock.kernels.attention_backend import BoolArray, CacheShape, PlannedBatch, QuerySpans
from penstock.kernels.block_pattern import NO_BLOCKS, BlockPattern
from penstock.kernels.exact_attention import ROW_MULTIPLE
from penstock.kernels.kv_cache import clear_places, write_kv
from penstock.kernels.linear import padded_rows
from penstock.kernels.low_rank import AdapterRows
from penstock.services.worker.kv_memory import KVCache
from penstock.services.worker.layer_groups import LayerGroups
from penstock.services.worker.models.causal_model import StepAdapters, StepInputs, VirtualRows
from penstock.services.worker.models.specification import CacheSpecification
from penstock.services.worker.plain_attention import AnyAttention, PlainAttention
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable

_NO_ADAPTERS = StepAdapters()
MANY_ROWS = 512
"""More are filled up with up to 127."""


class RowPadding(NamedTuple):
    """The numbers of rows that a step may have: multiples of one number, from another on."""

    multiple: int
    minimum: int
    packed: bool = False
    """Whether many rows are filled up to what packed products need, so that not each of these
    copies them to do so."""

    def missing(self, rows: int) -> int:
        """How many rows are to be added to ``rows``."""
        if self.packed and rows > MANY_ROWS:
            return padded_rows(rows) - rows
        return max(-rows % self.multiple, self.minimum - rows)


class AttendedCache(NamedTuple):
    """What layers of one group read alike, and what plans their attention."""

    group: int
    shape: CacheShape
    scale: float
    attention: PlainAttention
    besides: BlockPattern = NO_BLOCKS


def attended_caches(
    caches: Sequence[CacheSpecification],
    grouped: LayerGroups,
    attention: AnyAttention,
    num_blocks: int,
    block_size: int,
    dtype: torch.dtype,
    *,
    exact: bool = False,
    first: int = 0,
) -> tuple[list[AttendedCache], list[int]]:
    """What layers with these caches read, and the number among those of each layer. exact, first:
    as in ``CacheShape``."""
    of_layers = [(group, cache) for (group, _), cache in zip(grouped.places, caches, strict=True)]
    distinct = list(dict.fromkeys(of_layers))
    found = []
    for group, cache in distinct:
        shape = CacheShape(
            cache.num_kv_heads, num_blocks, block_size, cache.head_dim, cache.num_heads, dtype,
            exact, cache.window, cache.softcap, cache.chunk, first,
        )  # fmt: skip
        how = attention.of(cache)
        found.append(AttendedCache(group, shape, cache.score_scale, how, cache.besides))
    return found, [distinct.index(each) for each in of_layers]


class LayerInputs(NamedTuple):
    """Where a layer's K and V go, and how it attends."""

    slot_mapping: torch.Tensor
    """[N] int64, see ``write_kv``."""
    attention: Sequence[PlannedBatch]
    scale: float
    """What scores are multiplied by."""


class PlannedAttention(NamedTuple):
    """A ``StepAttention`` by torch's operations, planned for one step."""

    layers: Sequence[LayerInputs]
    """For each layer; layers that read their cache alike share one."""
    cache: KVCache

    def __call__(
        self,
        layer: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        keys, values = self.cache[layer]
        inputs = self.layers[layer]
        write_kv(key, value, keys, values, inputs.slot_mapping)
        return paged_attention(query, keys, values, inputs.attention, inputs.scale, sinks)


class InputBuilder:
    """Builds the inputs of steps, all on the host, and uploads them.

    The rows of a step: one for each decoding slot, ascending, or several where it has drafts; then
    the tokens of each chunk; then padding rows, which write to a block that no sequence owns and
    that nobody reads. A draft attends as any decode row does, in an exact batch to the same bits.
    """

    def __init__(
        self,
        slots: SlotTable,
        caches: Sequence[AttendedCache],
        layers: Sequence[int],
        memory: KVCache,
        rows: RowPadding,
        padding_block: int,
        device: torch.device,
    ) -> None:
        """layers: for each layer of the model the index of its cache; memory: what they keep."""
        self._slots = slots
        self._caches, self._layers, self._memory = caches, layers, memory
        self._block_size = slots.capacity.block_size
        self._rows = rows
        self._device = device
        self._padding_slot = padding_block * self._block_size

    def build(self, step: PlannedStep) -> StepInputs:
        return self._build_mixed(step) if step.chunks else self._build_decode(step)

    def _decode_rows(self, step: PlannedStep) -> tuple[IntArray, IntArray]:
        """Token and position of each decode row."""
        if step.drafts is not None:
            return step.drafts.tokens, step.drafts.positions
        return self._slots.last_token[step.decoding], self._slots.position[step.decoding]

    def _build_decode(self, step: PlannedStep) -> StepInputs:
        """The common step: decode rows alone, all of them sampled."""
        decoding = step.decoding
        token, position = self._decode_rows(step)
        rows = np.arange(len(decoding), dtype=np.int64)
        return StepInputs(
            tokens=self._upload(token, 0),
            positions=self._upload(position, 0),
            attention=self._of_layers(
                decoding,
                position,
                [self._plan_single(cache, rows, position, decoding) for cache in self._caches],
            ),
            sampled=None,
            adapters=self._adapters(decoding),
        )

    def _build_mixed(self, step: PlannedStep) -> StepInputs:
        decoding = step.decoding
        token, position = self._decode_rows(step)
        tokens, positions = [token], [position]
        owners, sampled = [decoding], [np.arange(len(decoding), dtype=np.int64)]
        row, virtual = len(decoding), []
        for chunk in step.chunks:
            count = len(chunk.tokens)
            tokens.append(chunk.tokens.astype(np.int64))
            if chunk.start < chunk.virtual:
                virtual.append(self._virtual(chunk, row))
                tokens[-1][: virtual[-1].length] = 0
            positions.append(np.arange(chunk.start, chunk.start + count, dtype=np.int64))
            owners.append(np.full(count, chunk.slot, np.int64))
            row += count
            if chunk.sample:
                sampled.append(np.array([row - 1], np.int64))
        position = np.concatenate(positions)
        return StepInputs(
            tokens=self._upload(np.concatenate(tokens), 0),
            positions=self._upload(position, 0),
            attention=self._of_layers(
                np.concatenate(owners),
                position,
                [self._plan_attention(cache, step, positions[0]) for cache in self._caches],
            ),
            sampled=self._upload(np.concatenate(sampled), 0),
            adapters=self._adapters(np.concatenate(owners), np.concatenate(sampled), virtual),
        )

    def _virtual(self, chunk: PlannedChunk, row: int) -> VirtualRows:
        """The virtual tokens of a chunk whose first row is ``row``."""
        length = min(chunk.virtual - chunk.start, len(chunk.tokens))
        return VirtualRows(int(self._slots.soft_prompt[chunk.slot]), row, length, chunk.start)

    def clear(self, owners: IntArray, positions: IntArray) -> None:
        """Zero the values of these slots' positions: nothing attends to them, but a weight of 0
        times a NaN would still be NaN."""
        mappings = [
            torch.from_numpy(self._slot_mapping(table, owners, positions)).to(self._device)
            for table in self._slots.blocks.tables
        ]
        for number, (_, values) in zip(self._layers, self._memory, strict=True):
            clear_places(values, mappings[self._caches[number].group])

    def _adapters(
        self,
        owners: IntArray,
        sampled: IntArray | None = None,
        virtual: Sequence[VirtualRows] = (),
    ) -> StepAdapters:
        """owners: slot of each row; sampled: the rows whose logits are wanted."""
        if not self._slots.adapter_numbers:
            return _NO_ADAPTERS
        numbers = self._slots.adapter[owners]
        if not numbers.any():
            return StepAdapters(virtual=virtual) if virtual else _NO_ADAPTERS
        chosen = () if sampled is None else self._grouped(numbers[sampled])
        return StepAdapters(self._grouped(numbers), chosen, virtual)

    def _grouped(self, numbers: IntArray) -> list[AdapterRows]:
        """numbers: of each row's adapter. As many rows of each as its products must have. The
        groups come in the order of their digests: numbers are each rank's own, and the ranks add up
        one adapter's results after another's."""
        found, there = [], set(numbers.tolist())
        for _, adapter in sorted(self._slots.adapter_numbers.items()):
            if adapter not in there:
                continue
            rows = np.flatnonzero(numbers == adapter)
            padded = np.pad(rows, (0, -len(rows) % ROW_MULTIPLE), "edge")
            both = (torch.from_numpy(each).to(self._device) for each in (rows, padded))
            found.append(AdapterRows(adapter, *both))
        return found

    def chosen_rows(self, rows: IntArray) -> torch.Tensor:
        """Rows of a step to make logits of, as many as a matrix product must have."""
        return self._upload(rows, 0)

    def _of_layers(
        self, owners: IntArray, positions: IntArray, planned: list[Sequence[PlannedBatch]]
    ) -> PlannedAttention:
        """owners, positions: slot and position of each row; planned: for each cache."""
        mappings = [
            self._upload(self._slot_mapping(table, owners, positions), self._padding_slot)
            for table in self._slots.blocks.tables
        ]
        inputs = [
            LayerInputs(mappings[cache.group], batches, cache.scale)
            for cache, batches in zip(self._caches, planned, strict=True)
        ]
        return PlannedAttention([inputs[number] for number in self._layers], self._memory)

    def _slot_mapping(self, table: IntArray, owners: IntArray, positions: IntArray) -> IntArray:
        size = self._block_size
        blocks: IntArray = table[owners, positions // size]
        return blocks * size + positions % size

    def _upload(self, values: IntArray, filler: int) -> torch.Tensor:
        padding = self._rows.missing(len(values))
        if padding > 0:
            values = np.concatenate((values, np.full(padding, filler, np.int64)))
        return torch.from_numpy(values).to(self._device)

    def _plan_attention(
        self, cache: AttendedCache, step: PlannedStep, decode_positions: IntArray
    ) -> Sequence[PlannedBatch]:
        """Chunks of one token attend as decode rows do."""
        row = len(step.decoding)
        rows, positions = [np.arange(row, dtype=np.int64)], [decode_positions]
        owners, chunks = [step.decoding], []
        for chunk in step.chunks:
            if len(chunk.tokens) == 1:
                rows.append(np.array([row], np.int64))
                positions.append(np.array([chunk.start], np.int64))
                owners.append(np.array([chunk.slot], np.int64))
            else:
                chunks.append((row, chunk.start, len(chunk.tokens), chunk.slot))
            row += len(chunk.tokens)
        batches: list[PlannedBatch] = []
        slots = np.concatenate(owners)
        if len(slots):
            batches += self._plan_single(
                cache, np.concatenate(rows), np.concatenate(positions), slots
            )
        if chunks:
            first, starts, counts, slots = np.array(chunks, np.int64).T
            spans = QuerySpans(
                first, starts, counts, self._table(cache)[slots], self._besides(cache, len(slots))
            )
            batches += cache.attention.prefill.plan(spans, cache.shape, self._device)
        return batches

    def _plan_single(
        self, cache: AttendedCache, rows: IntArray, positions: IntArray, owners: IntArray
    ) -> Sequence[PlannedBatch]:
        """Spans of one row."""
        besides = self._besides(cache, len(owners))
        spans = QuerySpans(rows, positions, None, self._table(cache)[owners], besides)
        return cache.attention.decode.plan(spans, cache.shape, self._device)

    def _besides(self, cache: AttendedCache, spans: int) -> BoolArray | None:
        if not any(cache.besides):
            return None
        width = self._table(cache).shape[1]
        return np.broadcast_to(cache.besides.mask(width), (spans, width))

    def _table(self, cache: AttendedCache) -> IntArray:
        return self._slots.blocks.tables[cache.group]
