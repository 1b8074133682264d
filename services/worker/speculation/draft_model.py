"""Drafts of a draft model: another language model over the same tokens."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.services.worker.models.causal_model import CausalModel, StepInputs
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
from penstock.services.worker.slots import SlotTable
from penstock.services.worker.speculation.model_drafter import ModelDrafter
from penstock.services.worker.speculation.proposer import DRAFT_MODEL
from penstock.services.worker.step_inputs import RowPadding


class DraftModelDrafter(ModelDrafter):
    """What it keeps of a token is what it computed when it drafted the one behind; so of accepted
    drafts only the last may be left to keep, and those that a grammar forced."""

    def __init__(self, model: CausalModel, slots: SlotTable) -> None:
        """model: not prepared yet."""
        with torch.inference_mode():
            model.prepare(slots.capacity.max_model_len)
        rows = RowPadding(1, 1, model.packed)
        super().__init__(DRAFT_MODEL, slots, model.caches, model.dtype, model.device, rows)
        self._model = model
        self._vocab = min(model.vocab_size, slots.capacity.vocab_size)
        self._one_row = torch.zeros(1, dtype=torch.int64, device=model.device)

    def _first(self, slots: IntArray) -> Tensor:
        return torch.empty(len(slots), 0, device=self._device)

    def _pass(self, inputs: StepInputs, state: Tensor) -> Tensor:
        return self._model.hidden(self._known(inputs), None)

    def _logits(self, state: Tensor) -> Tensor:
        return self._model.logits(state, None)[:, : self._vocab]

    def _keep_last(self, slots: IntArray) -> None:
        self._compute(self._inputs_of(slots, self.slots.last_token[slots], 0))

    def _keep(self, step: PlannedStep) -> None:
        decoding = step.decoding[self.live[step.decoding]]
        chunks = [chunk for chunk in step.chunks if self.live[chunk.slot]]
        if len(decoding) or chunks:
            self._compute(self.inputs.build(PlannedStep(decoding, chunks, decoding)))

    def _settle(self, slots: IntArray, drafts: DraftRows, accepted: IntArray) -> None:
        counts = np.diff(np.flatnonzero(drafts.ahead == 0), append=len(drafts.ahead))
        behind: IntArray = np.repeat(self._behind[slots], counts)
        most: IntArray = np.repeat(np.where(self.live[slots], accepted, 0), counts)
        rows = np.flatnonzero((drafts.ahead > behind) & (drafts.ahead <= most))
        if len(rows):
            at: IntArray = np.repeat(slots, counts)[rows]
            kept = DraftRows(drafts.tokens[rows], drafts.positions[rows], drafts.ahead[rows])
            self._compute(self.inputs.build(PlannedStep(at, [], at, drafts=kept)))

    def _compute(self, inputs: StepInputs) -> None:
        """Keep the rows of a step. Behind the last layer's attention one row is computed, since
        none is asked for."""
        self._model.hidden(self._known(inputs), self._one_row)

    def _known(self, inputs: StepInputs) -> StepInputs:
        """With a token of its vocabulary in the place of one that only the target's table has."""
        if self._model.vocab_size >= self.slots.capacity.vocab_size:
            return inputs
        return inputs._replace(tokens=inputs.tokens.clamp_max(self._model.vocab_size - 1))
