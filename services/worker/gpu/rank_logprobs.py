"""Logprobs on the devices of ranks, each of which has the logits of its own tokens: those of rows
that ask are gathered, and rank 0 reads them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor

from penstock.kernels.gpu.logprobs import logprob_columns, logprobs
from penstock.kernels.gpu.sampler_memory import SamplerSpace
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.logprob_rows import AskedLogprobs, GpuLogprobs
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable

if TYPE_CHECKING:
    from penstock.services.worker.gpu.rank_decoder import RankGpuDecoder


class RankLogprobs(GpuLogprobs):
    """``GpuLogprobs`` of the ranks of the last stage; what others than rank 0 write means
    nothing."""

    def __init__(
        self, table: SlotTable, state: BatchState, decoder: RankGpuDecoder, space: SamplerSpace
    ) -> None:
        super().__init__(table, state, decoder, space)
        self._own = decoder
        self._gathered = logprob_columns(len(state.rows), self._places.device)

    def begin(
        self, step: PlannedStep, chunks: list[tuple[int, PlannedChunk]]
    ) -> AskedLogprobs | None:
        return super().begin(step, chunks) if self._own.makes_logits else None

    def _fill(self, sampled: IntArray, rows: IntArray) -> None:
        own = self._own.space.logits[: len(sampled)]
        if len(rows) == len(sampled):
            self._write(self._own.whole(own), self._state.sample_slots[: len(rows)])
            return
        index = sent(rows, self._places.device)
        slots = sent(sampled[rows].astype(np.int32), self._places.device)
        columns, self._columns = self._columns, self._gathered
        self._write(self._own.whole(own.index_select(0, index)), slots)
        self._columns = columns
        for column, found in zip(columns, self._gathered, strict=True):
            column.index_copy_(0, index, found[: len(rows)])

    def of_rows(self, count: int) -> None:
        self._write(self._own.whole(self._own.space.logits[:count]), self._state.sample_slots)

    def _write(self, logits: Tensor, slots: Tensor) -> None:
        """The first columns, by logits [n, V] of the rows of these slots."""
        state = self._state
        logprobs(
            logits, slots, state.asked["logprobs"], state.last_token, self._space, self._columns
        )
