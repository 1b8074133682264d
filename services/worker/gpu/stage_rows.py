"""Rows with samplers in an order of their own, and the bounds of those that Mirostat steers.

Parameters travel when a slot is taken; a step launches ``sampler_stages`` once, or twice around a
sort where a row has tail-free sampling, and nothing where no row has stages. Mirostat's bound lies
on the device, since the next step reads it before the host knows this one's tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.sampler_memory import (
    MOST_STAGES,
    STAGE_NUMBERS,
    SamplerSlots,
    SamplerSpace,
)
from penstock.kernels.gpu.sampler_stages import sampler_stages
from penstock.kernels.gpu.surprise import surprise
from penstock.kernels.gpu.tail_free_rows import tail_free_rows
from penstock.kernels.sampling.samplers import SAMPLERS
from penstock.kernels.sampling.samplers.mirostat import first_bound
from penstock.protocol.wire.messages.steps import SlotAdjustments
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.slots import IntArray, PlannedChunk, SlotTable

_SORTS = "tfs"
RowLogits = Callable[[int, int], Tensor]
"""``StepDecoder.row_logits``."""


class StageRows:
    """The stages of one executor's slots."""

    def __init__(
        self, table: SlotTable, state: BatchState, slots: SamplerSlots, space: SamplerSpace
    ) -> None:
        count = len(state.rows)
        self._table, self._state, self._slots, self._space = table, state, slots, space
        self._device = state.rows.device
        self._share = np.zeros(count, np.float32)
        """Of tail-free sampling; 0: none."""
        self._steering = np.zeros((count, 2), np.float32)
        """Mirostat's tau and eta."""
        self._staged: IntArray = np.zeros(0, np.int64)
        self._sampled: IntArray = np.zeros(0, np.int64)
        self._sorted: IntArray = self._staged
        self._steered: IntArray = self._staged

    def begin(self, slot: int, asked: SlotAdjustments) -> None:
        """A slot with stages."""
        kinds = np.zeros(MOST_STAGES, np.int32)
        values = np.zeros((MOST_STAGES, STAGE_NUMBERS), np.float32)
        self._share[slot] = 0.0
        bound = 0.0
        for place, stage in enumerate(asked.stages):
            kinds[place] = SAMPLERS[stage.sampler].number
            values[place, : len(stage.values)] = stage.values
            if stage.sampler == _SORTS:
                self._share[slot] = stage.values[0]
            if stage.sampler == "mirostat":
                self._steering[slot] = stage.values
                bound = first_bound(stage.values[0])
        slots = self._slots
        slots.stage_count[slot] = len(asked.stages)
        slots.stage_kind[slot] = sent(kinds, self._device)
        slots.stage_value[slot] = sent(values, self._device)
        slots.bound[slot] = bound

    def plan(self, sampled: IntArray) -> None:
        """The slots of the rows that the next ``run`` and ``note`` are of."""
        adjustments = self._table.adjustments
        asking = np.flatnonzero(self._table.asks[sampled])
        slots = sampled[asking].tolist()
        staged = [
            row
            for row, slot in zip(asking.tolist(), slots, strict=True)
            if (asked := adjustments[slot]) is not None and asked.stages
        ]
        self._sampled = sampled
        self._staged = np.array(staged, np.int64)
        at = sampled[self._staged]
        self._sorted = self._staged[self._share[at] > 0.0]
        self._steered = self._staged[self._table.steers[at]]

    def run(self, rows: Tensor, count: int) -> None:
        """Run the stages of a step's rows over the adjusted logits. rows: int32, the slot of each
        of the ``count`` rows."""
        if len(self._staged):
            self._launch(rows, count, after_sort=False)
        if len(self._sorted):
            shares = sent(self._share[self._sampled[self._sorted]], self._device)
            tail_free_rows(self._space.adjusted, sent(self._sorted, self._device), shares)
            self._launch(rows, count, after_sort=True)

    def _launch(self, rows: Tensor, count: int, *, after_sort: bool) -> None:
        state = self._state
        sampler_stages(
            rows, count, state.seed_low, state.seed_high, self._slots, self._space,
            after_sort,
        )  # fmt: skip

    def note(self, logits: Tensor) -> None:
        """The rows' tokens are committed. logits: [R, V], as the model made them."""
        if not len(self._steered):
            return
        slots = self._sampled[self._steered]
        at = sent(slots, self._device)
        tokens = self._state.last_token.index_select(0, at)
        bits = self._surprise(logits, self._steered, tokens)
        tau, eta = sent(self._steering[slots], self._device).unbind(1)
        bound = self._slots.bound
        bound.index_add_(0, at, eta * (tau - bits))

    def recall(self, first: int, chunk: PlannedChunk, row_logits: RowLogits) -> None:
        """Show Mirostat the output of a sequence that takes a slot again. first: the chunk's first
        row of the step."""
        tau, eta = self._steering[chunk.slot].tolist()
        for begin in range(0, len(chunk.drawn), len(self._state.rows)):
            tokens = chunk.drawn[begin : begin + len(self._state.rows)].astype(np.int32)
            logits = row_logits(first + chunk.drawn_from + begin, len(tokens))
            bits = self._surprise(logits, np.arange(len(tokens)), sent(tokens, self._device))
            self._slots.bound[chunk.slot] += eta * (len(tokens) * tau - bits.sum())

    def _surprise(self, logits: Tensor, rows: IntArray, tokens: Tensor) -> Tensor:
        out = torch.empty(len(rows), dtype=torch.float32, device=self._device)
        surprise(logits, sent(rows.astype(np.int32), self._device), tokens, out)
        return out

    def warm_up(self, logits: Tensor) -> None:
        """Run every kernel once, on rows that are no one's. logits: [R, V]."""
        for after_sort in (False, True):
            self._launch(self._state.sample_slots, len(logits), after_sort=after_sort)
        self._surprise(logits, np.zeros(1, np.int64), self._state.last_token[:1])
