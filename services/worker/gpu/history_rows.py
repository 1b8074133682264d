"""Rows that ask for DRY or no-repeat-ngram: what a step adds to their logits.

What repeats is found on the host (``RepeatSlots``), which must have seen a row's latest token: as
for grammars, the layers of the step are on the stream by then.
"""

from __future__ import annotations

import numpy as np
import torch

from penstock.kernels.gpu.sampler_memory import HistoryEntries, no_history
from penstock.protocol.wire.messages.steps import SlotAdjustments
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.repeat_slots import RepeatSlots
from penstock.services.worker.slot_history import History
from penstock.services.worker.slots import IntArray


class HistoryRows:
    """The repeats of one executor's slots, and the entries of its present step."""

    def __init__(self, slots: int, device: torch.device) -> None:
        self._device = device
        self._repeats = RepeatSlots(slots)
        self._biases: dict[int, dict[int, float]] = {}
        self._none = no_history(device)
        self.entries: HistoryEntries = self._none

    def begin(self, slot: int, known: History, asked: SlotAdjustments) -> None:
        self._repeats.begin(slot, known, asked)
        biased, biases = np.frombuffer(asked.biased, "<i4"), np.frombuffer(asked.biases, "<f4")
        self._biases[slot] = dict(zip(biased.tolist(), biases.tolist(), strict=True))

    def forget(self, slot: int) -> None:
        if self._repeats.asks[slot]:
            self._repeats.forget(slot)
            del self._biases[slot]

    def asking(self, slots: IntArray) -> IntArray:
        """Rows of a step that ask. slots: [R], that of each row."""
        return np.flatnonzero(self._repeats.asks[slots])

    def took(self, slots: IntArray, tokens: IntArray) -> None:
        """A new token of each of these slots, which all ask."""
        self._repeats.took(slots, tokens)

    def fill(self, slots: IntArray, rows: IntArray) -> None:
        """Make ``entries`` those of a step of which these rows ask."""
        if not len(rows):
            self.entries = self._none
            return
        counts = np.zeros(len(slots) + 1, np.int64)
        tokens, values = [], []
        for row in rows.tolist():
            slot = int(slots[row])
            lowered, lost = self._repeats.penalties(slot)
            biases = self._biases[slot]
            if biases:  # a token has one entry, so its bias goes along
                lost = lost + np.array([biases.get(t, 0.0) for t in lowered.tolist()], np.float32)
            banned = self._repeats.bans(slot)
            tokens += [lowered, banned]
            values += [lost, np.full(len(banned), -np.inf, np.float32)]
            counts[row + 1] = len(lowered) + len(banned)
        self.entries = HistoryEntries(
            sent(np.cumsum(counts).astype(np.int32), self._device),
            sent(np.concatenate(tokens).astype(np.int32), self._device),
            sent(np.concatenate(values), self._device),
        )
