"""Drafts of an EAGLE-3 head: a row reads a token and the target's features ahead of it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from penstock.kernels.kv_cache import write_kv
from penstock.services.worker.models.causal_model import StepInputs
from penstock.services.worker.models.decoder import Decoder
from penstock.services.worker.models.eagle3_head import Eagle3Head
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedStep
from penstock.services.worker.slots import SlotTable
from penstock.services.worker.speculation.model_drafter import ModelDrafter
from penstock.services.worker.speculation.proposer import EAGLE3
from penstock.services.worker.step_inputs import RowPadding


class Eagle3Drafter(ModelDrafter):
    """Its first pass reads the target's features, those behind it its own results in their place.
    What is kept of accepted drafts is therefore computed anew. Behind a cached prefix the features
    of the position before are not known: they are taken to be zero there."""

    def __init__(self, head: Eagle3Head, target: Decoder, slots: SlotTable) -> None:
        """target: captures what the head reads from now on."""
        rows = RowPadding(1, 1, head.packed)
        cache = head.specification.cache
        super().__init__(EAGLE3, slots, [cache], head.dtype, target.device, rows, first_position=1)
        self._head, self._target = head, target
        target.captured_layers = frozenset(head.specification.captured_layers)
        with torch.inference_mode():
            head.prepare(slots.capacity.max_model_len)
            self._before = torch.zeros(
                len(self.live),
                head.specification.hidden_size,
                dtype=head.dtype,
                device=target.device,
            )
        """[slots, hidden]: features of the position ahead of each slot's own."""

    def begin(self, slot: int, text: npt.NDArray[np.int32], prompt_len: int, corpus: bytes) -> None:
        super().begin(slot, text, prompt_len, corpus)
        self._before[slot] = 0

    def _first(self, slots: IntArray) -> Tensor:
        return self._before.index_select(0, self.on_device(slots))

    def _pass(self, inputs: StepInputs, state: Tensor) -> Tensor:
        return self._head.hidden(inputs, state)

    def _logits(self, state: Tensor) -> Tensor:
        return self._head.logits(state)

    def _keep_last(self, slots: IntArray) -> None:
        position = self.slots.position[slots]
        self._write(slots, self.slots.last_token[slots], position, self._first(slots))

    def _keep(self, step: PlannedStep) -> None:
        decoding = np.flatnonzero(self.live[step.decoding])
        owners = [step.decoding[decoding]]
        tokens = [self.slots.last_token[owners[0]]]
        positions, rows = [self.slots.position[owners[0]]], [decoding]
        first, begin = [np.ones(len(decoding), np.bool_)], len(step.decoding)
        for chunk in step.chunks:
            count = len(chunk.tokens)
            if self.live[chunk.slot]:
                inside = np.arange(count)
                owners.append(np.full(count, chunk.slot))
                tokens.append(chunk.tokens.astype(np.int64))
                positions.append(chunk.start + inside)
                rows.append(begin + inside)
                first.append(inside == 0)
            begin += count
        owner = np.concatenate(owners)
        if len(owner):
            self._keep_rows(
                owner, np.concatenate(tokens), np.concatenate(positions), np.concatenate(rows),
                np.concatenate(first),
            )  # fmt: skip

    def _keep_rows(
        self,
        owners: IntArray,
        tokens: IntArray,
        positions: IntArray,
        rows: IntArray,
        first: IntArray,
    ) -> None:
        """Keep consecutive positions of several slots, the first of each behind what is known.
        rows: of the target's step."""
        features = self._head.features(self._target.captured, self.on_device(rows))
        begin = self.on_device(np.flatnonzero(first))
        ahead = torch.roll(features, 1, 0)
        ahead[begin] = self._first(owners[first])
        self._write(owners, tokens, positions, ahead)
        last = np.append(first[1:], True)
        self._before[self.on_device(owners[last])] = features[self.on_device(last)]

    def _settle(self, slots: IntArray, drafts: DraftRows, accepted: IntArray) -> None:
        begin = np.flatnonzero(drafts.ahead == 0)
        live = np.flatnonzero(self.live[slots])
        if not len(live):
            return
        counts = accepted[live] + 1
        owners = np.repeat(slots[live], counts)
        inside = np.arange(len(owners)) - np.repeat(np.cumsum(counts) - counts, counts)
        rows = np.repeat(begin[live], counts) + inside
        self._keep_rows(owners, drafts.tokens[rows], drafts.positions[rows], rows, inside == 0)

    def _write(
        self, owners: IntArray, tokens: IntArray, positions: IntArray, features: Tensor
    ) -> None:
        """Keep rows of these slots. features: of the positions before them."""
        keys, values = self._memory.layers[0]
        places = self.places(owners, positions)
        self._head.keep(
            self.on_device(tokens), self.on_device(positions), features,
            lambda key, value: write_kv(key, value, keys, values, places),
        )  # fmt: skip
