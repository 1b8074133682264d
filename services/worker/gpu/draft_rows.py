"""Rows of drafts on a CUDA device: how a step with them is laid out, and what is drawn there.

The last token of a slot and its drafts are a chunk, as of a prompt: its rows attend to each other.
Slots without drafts are decode rows. Logits are made of the first row of each slot, which is drawn
as in any step, then of the rows of drafts. Those are drawn by the same kernels, from columns of
sampling parameters that have a row's own number of output tokens: so they draw what their slots
would draw there later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.sampler_memory import no_history
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.gpu.sampler import GpuSampler
from penstock.services.worker.gpu.workspace import LogitsSpace
from penstock.services.worker.planned_step import DraftRows, IntArray, PlannedChunk, PlannedStep
from penstock.services.worker.speculation.verification import first_rows

_NOTHING = np.zeros(0, np.int32)


class DraftLayout(NamedTuple):
    """A step with drafts, as the device computes it."""

    step: PlannedStep
    """Slots with drafts have a chunk each."""
    num_rows: int
    sample_rows: IntArray
    """The step's row of each row of logits: the first one of each slot, then those of drafts."""
    later: IntArray
    """Those of drafts, as indices of ``DraftRows``."""
    slots: IntArray
    """Their slots …"""
    ahead: IntArray
    """… and how many drafts stand ahead of each."""


def lay_out(step: PlannedStep, drafts: DraftRows) -> DraftLayout:
    """step: the one without drafts."""
    first = first_rows(drafts)
    counts = np.diff(first, append=len(drafts.ahead))
    alone = counts == 1
    places = np.empty(len(drafts.ahead), np.int64)
    row = int(alone.sum())
    places[first[alone]] = np.arange(row)
    chunks = []
    for number in np.flatnonzero(~alone).tolist():
        begin, count = int(first[number]), int(counts[number])
        tokens = drafts.tokens[begin : begin + count].astype(np.int32)
        slot, start = int(step.decoding[number]), int(drafts.positions[begin])
        chunks.append(PlannedChunk(slot, start, tokens, False, _NOTHING))
        places[begin : begin + count] = np.arange(row, row + count)
        row += count
    later = np.flatnonzero(drafts.ahead > 0)
    computed = step._replace(
        decoding=step.decoding[alone], chunks=chunks, sampled=step.sampled.copy(), drafts=drafts
    )
    sample_rows = np.concatenate((places[first], places[later]))
    slots = np.repeat(step.decoding, counts)[later]
    return DraftLayout(computed, row, sample_rows, later, slots, drafts.ahead[later])


class DraftDraws:
    """The draws of drafts' rows, in memory of their own."""

    def __init__(self, state: BatchState, sampler: GpuSampler, space: LogitsSpace) -> None:
        self._state, self._sampler, self._space = state, sampler, space
        device, count = state.rows.device, len(state.rows)
        self._device, self._on_gpu = device, device.type == "cuda"
        self._rows = torch.arange(count, dtype=torch.int32).to(device)
        self._unread = torch.zeros(3, count, dtype=torch.int32, device=device)
        self._none = no_history(device)
        self._no_asks = torch.zeros(count, dtype=torch.int32, device=device)
        self._result = torch.zeros(2, count, dtype=torch.int32, device=device)
        self._results = [torch.zeros(2, count, dtype=torch.int32, pin_memory=self._on_gpu)
                         for _ in range(RING)]  # fmt: skip
        self._sent = [torch.zeros(2 * count, dtype=torch.int64, pin_memory=self._on_gpu)
                      for _ in range(RING)]  # fmt: skip

    def draw(
        self, logits: Tensor, slots: IntArray, ahead: IntArray, ring: int, *, limited: bool
    ) -> Tensor:
        """Draw behind the draw and commit of each slot's first row. logits: [N, V]; slots, ahead:
        [N], the slot of each row and the drafts ahead of it; ring: host buffers that are free;
        limited: a slot has a top_k, top_p or min_p. Returns [2, R] as ``LogitsSpace.result``, on
        the host once the step is over."""
        count, state = len(slots), self._state
        sent = self._sent[ring][: 2 * count]
        sent.numpy()[:count], sent.numpy()[count:] = slots, ahead - 1
        places = sent.to(self._device, non_blocking=True)
        at, before = places[:count], places[count:]
        temperature = state.temperature.index_select(0, at)
        low, high = state.seed_low.index_select(0, at), state.seed_high.index_select(0, at)
        number = state.num_output.index_select(0, at) + before.to(torch.int32)
        space, rows = self._space, self._rows[:count]
        asked = self._sampler.slots, self._sampler.space
        if limited:
            columns = asked[0]._replace(
                asks=self._no_asks, temperature=temperature, num_output=number,
                top_k=asked[0].top_k.index_select(0, at), top_p=asked[0].top_p.index_select(0, at),
                min_p=asked[0].min_p.index_select(0, at),
            )  # fmt: skip
            adjust_logits(logits, rows, columns, asked[1], self._none, GREEDY_TEMPERATURE)
            keep_floor(logits, rows, low, high, columns, asked[1], GREEDY_TEMPERATURE)
            splits = draw(logits, rows, temperature, low, high, number, space.best, space.token,
                          GREEDY_TEMPERATURE, columns, asked[1])  # fmt: skip
        else:
            splits = draw(logits, rows, temperature, low, high, number, space.best, space.token,
                          GREEDY_TEMPERATURE)  # fmt: skip
        tokens, positions, outputs = self._unread
        commit(space.best, space.token, rows, tokens, positions, outputs, self._result, count,
               splits)  # fmt: skip
        host = self._results[ring]
        return host.copy_(self._result, non_blocking=True)

    def warm_up(self) -> None:
        """Run every kernel once, on rows that are no one's."""
        most = len(self._rows)
        for first, count in ((0, 1), (1, 1), (0, most), (1, most - 1)):
            logits = self._space.logits[first : first + count]
            nothing = np.zeros(count, np.int64)
            for limited in (False, True):
                self.draw(logits, nothing, nothing + 1, 0, limited=limited)
