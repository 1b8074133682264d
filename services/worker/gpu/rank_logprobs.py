"""Logprobs on the devices of ranks, each of which has the logits of its own tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from penstock.kernels.gpu.sampler_memory import SamplerSpace
from penstock.kernels.sampling.shard import Shard
from penstock.kernels.sampling.shard_logprobs import shard_logprobs
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.logprob_rows import AskedLogprobs, GpuLogprobs
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable

if TYPE_CHECKING:
    from penstock.services.worker.gpu.rank_decoder import RankGpuDecoder


class RankLogprobs(GpuLogprobs):
    """``GpuLogprobs`` by what every rank knows of its own tokens, on those of the last stage."""

    def __init__(
        self,
        table: SlotTable,
        state: BatchState,
        decoder: RankGpuDecoder,
        space: SamplerSpace,
        shard: Shard,
    ) -> None:
        super().__init__(table, state, decoder, space)
        self._own, self._shard = decoder, shard

    def begin(
        self, step: PlannedStep, chunks: list[tuple[int, PlannedChunk]]
    ) -> AskedLogprobs | None:
        return super().begin(step, chunks) if self._own.makes_logits else None

    def _fill(self, sampled: IntArray, rows: IntArray) -> None:
        slots, device = sampled[rows], self._places.device
        at = sent(rows, device)
        logits = self._own.space.logits.index_select(0, at)
        tokens = self._state.last_token.index_select(0, sent(slots, device))
        self._write(at, logits, tokens, int(self._table.logprobs[slots].max()))

    def _fill_piece(self, first: int, tokens: Tensor, most: int) -> None:
        logits = self._own.own_row_logits(first, len(tokens))
        self._write(self._places[: len(tokens)].long(), logits, tokens, most)

    def _write(self, at: Tensor, logits: Tensor, tokens: Tensor, most: int) -> None:
        """The columns of rows ``at`` [n] int64. logits: [n, own tokens]; tokens: [n] int32."""
        found, columns = shard_logprobs(logits, tokens.long(), most, self._shard), self._columns
        columns.chosen.index_copy_(0, at, found.chosen)
        columns.rank.index_copy_(0, at, found.rank.to(torch.int32))
        columns.top_ids[:, :most].index_copy_(0, at, found.top_ids.to(torch.int32))
        columns.top[:, :most].index_copy_(0, at, found.top)
