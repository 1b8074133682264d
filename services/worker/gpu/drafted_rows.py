"""The rows of a step with drafts on a CUDA device: sent as guesses, placed and counted there.

Of each slot that decodes the last token has a row, in their order; behind these come the rows of
drafts, slot by slot. Logits rows are the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.draft_counts import count_accepted
from penstock.kernels.gpu.guessed_drafts import (
    COUNT,
    DRAFTS,
    DRAWN,
    ENTRY,
    FIRST,
    GUESSED,
    KNOWN,
    ROW,
    SLOT,
    TOKENS,
    Outcome,
    PlacedRows,
    PlannedRows,
    accept_drafts,
    place_drafts,
)
from penstock.kernels.gpu.sampler_memory import SamplerSlots
from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.gpu.chunk_rows import ChunkRows
from penstock.services.worker.planned_step import IntArray
from penstock.services.worker.speculation.drafting import Guess

_LISTS = 3


class DraftedRows:
    """Device arrays of one step; rows past the step's own are padding."""

    def __init__(self, state: BatchState, most: int, block_size: int) -> None:
        """most: rows of a step."""
        device, on_gpu = state.rows.device, state.rows.is_cuda
        self._state, self._block_size = state, block_size
        self.most_rows, self.most_guesses = most, most // 2
        count = _LISTS * most + self.most_guesses * ENTRY
        self._device = torch.full((count,), -1, dtype=torch.int32, device=device)
        self._lists = PlannedRows(*self._device[: _LISTS * most].view(_LISTS, most))
        self._entries = self._device[_LISTS * most :].view(self.most_guesses, ENTRY)
        self._sent = [torch.full((count,), -1, dtype=torch.int32, pin_memory=on_gpu)
                      for _ in range(RING)]  # fmt: skip
        tokens, positions, slots, own = torch.zeros(4, most, dtype=torch.int32, device=device)
        groups, _, width = state.all_tables.shape
        tables = torch.zeros(groups, most, width, dtype=torch.int32, device=device)
        self.placed = PlacedRows(tokens, positions, slots, own, tables)
        self._outcome = torch.zeros(2, self.most_guesses, dtype=torch.int32, device=device)
        self._told = [torch.zeros(2, self.most_guesses, dtype=torch.int32, pin_memory=on_gpu)
                      for _ in range(RING)]  # fmt: skip

    @property
    def tokens(self) -> Tensor:
        """[M] int32, of each row, as ``positions`` and ``slots``; slot -1: padding."""
        return self.placed.tokens

    @property
    def positions(self) -> Tensor:
        return self.placed.positions

    @property
    def slots(self) -> Tensor:
        return self.placed.slots

    def place(
        self, slots: IntArray, guesses: Sequence[Guess], padded: int, ring: int
    ) -> tuple[IntArray, IntArray]:
        """Ahead of the step's layers. slots: that decode; guesses: of some of them, ascending;
        padded: rows that are computed; ring: host buffers that are free. Returns the slot of each
        row of drafts, and how many drafts stand ahead of it."""
        host, count = self._sent[ring], len(slots)
        drafts = np.array([one.drafts for one in guesses])
        total, ends = int(drafts.sum()), np.cumsum(drafts)
        at = np.repeat(np.arange(len(guesses)), drafts)
        later = np.array([one.slot for one in guesses])[at]
        ahead = np.arange(total) - (ends - drafts)[at] + 1
        packed = host.numpy()
        lists = packed[: _LISTS * self.most_rows].reshape(_LISTS, self.most_rows)
        lists[0, :padded], lists[1, :count], lists[2, :padded] = -1, 0, -1
        lists[0, :count], lists[0, count : count + total] = slots, later
        lists[1, count : count + total], lists[2, count : count + total] = ahead, at
        lists[2, [one.row for one in guesses]] = np.arange(len(guesses))
        entries = packed[_LISTS * self.most_rows :].reshape(self.most_guesses, ENTRY)
        entries[:, SLOT] = -1
        for entry, one, begin in zip(entries, guesses, (ends - drafts).tolist(), strict=False):
            tokens = one.draft.tokens[:GUESSED]
            entry[SLOT], entry[KNOWN], entry[COUNT] = one.slot, one.known, len(tokens)
            entry[DRAFTS], entry[FIRST] = one.drafts, one.row
            entry[ROW], entry[DRAWN] = count + begin, begin
            entry[TOKENS : TOKENS + len(tokens)] = tokens
        self._device.copy_(host, non_blocking=True)
        self._place(padded)
        return later, ahead

    def _place(self, rows: int) -> None:
        state = self._state
        place_drafts(
            self._lists, self._entries, state.last_token, state.position, state.all_tables,
            self.placed, Outcome(*self._outcome), rows, self._block_size,
        )  # fmt: skip

    def accept(self, result: Tensor, drawn: Tensor, ring: int) -> Tensor:
        """Behind the draws. result, drawn: see ``accept_drafts``. Returns an ``Outcome`` [2, C],
        on the host once the step is over."""
        state = self._state
        accept_drafts(
            self._entries, state.last_token, state.position, state.num_output, self.tokens, result,
            drawn, Outcome(*self._outcome),
        )  # fmt: skip
        host = self._told[ring]
        return host.copy_(self._outcome, non_blocking=True)

    def count(self, result: Tensor, drawn: Tensor, slots: SamplerSlots) -> None:
        """Count accepted tokens of slots that ask for penalties; comes behind ``accept``."""
        count_accepted(self._entries, Outcome(*self._outcome), result, drawn, slots)

    def warm_up(self, result: Tensor, drawn: Tensor, slots: SamplerSlots) -> None:
        """Run all kernels once, on rows of no slot, and leave all rows padding."""
        self._device.fill_(-1)
        self._place(self.most_rows)
        self.accept(result, drawn, 0)
        self.count(result, drawn, slots)


StepRows = ChunkRows | DraftedRows
"""What the kernels must know of a step that has other rows than one of each decoding slot."""
