"""Logprobs of a step's rows on the device, and their way to the host.

Made after the step's tokens are committed, from the logits as they still lie there; a step whose
rows ask for none launches nothing. Logprobs of a prompt need logits of its every row: they are made
piece by piece, in the memory of the step's logits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.gpu.logprobs import LogprobColumns, logprob_columns, logprobs
from penstock.kernels.gpu.sampler_memory import SamplerSpace
from penstock.protocol.logprobs import OWN_WORDS
from penstock.protocol.wire.messages.steps import ChunkLogprobs, SampledLogprobs
from penstock.services.worker.gpu.batch_state import BatchState
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.gpu.step_decoder import StepDecoder
from penstock.services.worker.slots import IntArray, PlannedChunk, PlannedStep, SlotTable
from penstock.services.worker.speculation.verification import Verified
from penstock.services.worker.step_logprobs import (
    Words,
    asking_rows,
    chunk_logprobs,
    pack_entries,
    row_logprobs,
    trim,
)


class _Prompt(NamedTuple):
    chunk: PlannedChunk
    most: int
    pieces: list[LogprobColumns]
    """On the host, once the step is over."""


class RowsOfDrafts(NamedTuple):
    """Rows of a step with drafts, slot by slot, as ``DraftRows``."""

    tokens: npt.NDArray[np.int32]
    """That each row drew."""
    first: IntArray
    """The rows of slots' own tokens …"""
    later: IntArray
    """… and those of drafts, whose are ``columns``."""
    columns: LogprobColumns


class AskedLogprobs(NamedTuple):
    """What a step brings; the columns are on the host once the step is over."""

    rows: IntArray
    most: IntArray
    columns: LogprobColumns | None
    prompts: list[_Prompt]

    def of_rows(self, tokens: npt.NDArray[np.int32]) -> list[SampledLogprobs]:
        """tokens: [R], the step's."""
        if self.columns is None:
            return []
        words = _words(self.columns, tokens)[self.rows]
        return row_logprobs(words, self.rows, self.most)

    def of_drafts(self, rows: RowsOfDrafts, verified: Verified) -> list[SampledLogprobs]:
        """Of all tokens that a step with drafts brings."""
        if self.columns is None:
            return []
        words = np.empty((len(rows.tokens), OWN_WORDS + 2 * self.columns.top.shape[1]), "<i4")
        words[rows.first] = _words(self.columns, rows.tokens[rows.first])
        words[rows.later] = _words(rows.columns, rows.tokens[rows.later])
        parts = np.split(words[verified.rows], np.cumsum(verified.counts)[:-1])
        asked = zip(self.rows.tolist(), self.most.tolist(), strict=True)
        return [SampledLogprobs(row, trim(parts[row], most)) for row, most in asked]

    def of_prompts(self) -> list[ChunkLogprobs]:
        found = []
        for chunk, most, pieces in self.prompts:
            parts, done = [], 0
            for piece in pieces:
                end = done + len(piece.chosen)
                parts.append(_words(piece, chunk.predicted[done:end]))
                done = end
            found.append(chunk_logprobs(chunk, np.concatenate(parts), most))
        return found


def _words(columns: LogprobColumns, tokens: npt.NDArray[np.int32]) -> Words:
    chosen, rank, top_ids, top = (column.numpy()[: len(tokens)] for column in columns)
    return pack_entries(tokens, rank, chosen, top_ids, top)


class GpuLogprobs:
    """The columns of one executor's steps."""

    def __init__(
        self, table: SlotTable, state: BatchState, decoder: StepDecoder, space: SamplerSpace
    ) -> None:
        count, device = len(state.rows), state.rows.device
        self._table, self._state, self._decoder, self._space = table, state, decoder, space
        self._columns = logprob_columns(count, device)
        self._places = torch.arange(count, dtype=torch.int32).to(device)
        self._pinned = device.type == "cuda"

    def begin(
        self, step: PlannedStep, chunks: list[tuple[int, PlannedChunk]]
    ) -> AskedLogprobs | None:
        """Launch what a step's rows ask for; comes after its tokens are committed.

        chunks: ``asking_chunks`` of the step, which ``StepDecoder.head_of_all`` was run for if
        there are any.
        """
        rows = asking_rows(self._table, step.sampled)
        if not len(rows) and not chunks:
            return None
        columns = None
        if len(rows):
            self._fill(step.sampled, rows)
            columns = self._on_host(self._columns, len(step.sampled))
        prompts = [self._prompt(*one) for one in chunks]
        return AskedLogprobs(rows, self._table.logprobs[step.sampled[rows]], columns, prompts)

    def of_drafts(self, logits: Tensor, slots: IntArray, tokens: Tensor) -> LogprobColumns:
        """Columns of rows of drafts, on the host once the step is over. logits: [N, V]; slots: of
        each row; tokens: [N] int32, what it drew."""
        at = sent(slots, self._places.device)
        most = self._state.asked["logprobs"].index_select(0, at)
        logprobs(logits, self._places[: len(slots)], most, tokens, self._space, self._columns)
        return self._on_host(self._columns, len(slots))

    def _fill(self, sampled: IntArray, rows: IntArray) -> None:
        """Write the columns of the step's rows that ask. sampled: the slot of each row."""
        self.of_rows(len(sampled))

    def of_rows(self, count: int) -> None:
        """Compute the logprobs of the first ``count`` logits rows, as their slots ask."""
        state = self._state
        logprobs(
            self._decoder.space.logits[:count], state.sample_slots[:count],
            state.asked["logprobs"], state.last_token, self._space, self._columns,
        )  # fmt: skip

    def _prompt(self, first: int, chunk: PlannedChunk) -> _Prompt:
        most = int(self._table.prompt_logprobs[chunk.slot])
        pieces = []
        for begin in range(0, len(chunk.predicted), len(self._places)):
            tokens = chunk.predicted[begin : begin + len(self._places)]
            self._fill_piece(first + begin, self._sent(tokens), most)
            pieces.append(self._on_host(self._columns, len(tokens)))
        return _Prompt(chunk, most, pieces)

    def _fill_piece(self, first: int, tokens: Tensor, most: int) -> None:
        """Write the columns of ``tokens`` [n], which the step's rows from ``first`` on predict."""
        logits = self._decoder.row_logits(first, len(tokens))
        logprobs(
            logits, self._places[: len(tokens)], torch.full_like(self._places, most), tokens,
            self._space, self._columns,
        )  # fmt: skip

    def _sent(self, tokens: npt.NDArray[np.int32]) -> Tensor:
        host = torch.from_numpy(tokens.astype(np.int32))
        if self._pinned:
            host = host.pin_memory()
        return host.to(self._places.device, non_blocking=True)

    def _on_host(self, columns: LogprobColumns, count: int) -> LogprobColumns:
        """Copies under way, of the first ``count`` rows."""
        parts = []
        for column in columns:
            part = column[:count]
            host = torch.empty(part.shape, dtype=part.dtype, pin_memory=self._pinned)
            parts.append(host.copy_(part, non_blocking=True))
        return LogprobColumns(*parts)
