"""Draws of the rows of drafts on a CUDA device.

The first row of each slot is drawn as in any step. Rows of drafts are drawn by the same kernels,
from columns of sampling parameters that have a row's own number of output tokens: so they draw what
their slots would draw there later.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.adjust_logits import adjust_logits
from penstock.kernels.gpu.draft_counts import count_ahead
from penstock.kernels.gpu.draw import commit, draw
from penstock.kernels.gpu.keep_floor import keep_floor
from penstock.kernels.gpu.sampler_memory import no_history
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.gpu.sampler import GpuSampler
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.gpu.workspace import LogitsSpace
from penstock.services.worker.planned_step import IntArray

_LIMITS = ("top_k", "top_p", "min_p")
_ADJUSTMENTS = ("asks", "allowed", "entry_count", "entry_token", "entry_value", "entry_until")
"""Columns of ``SamplerSlots`` of slots that ask for biases or for some tokens alone."""
_PENALTIES = ("repetition", "frequency", "presence", "counts")
"""Those of slots that ask for penalties."""


class RowMasks(NamedTuple):
    """What rows of drafts may take whose slots follow a grammar."""

    rows: IntArray
    """[n]."""
    words: Tensor
    """[n, ceil(V / 32)] int32, on the device."""


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
        self.result = torch.zeros(2, count, dtype=torch.int32, device=device)
        """[2, R] int32, as ``LogitsSpace.result``."""
        self._results = [torch.zeros(2, count, dtype=torch.int32, pin_memory=self._on_gpu)
                         for _ in range(RING)]  # fmt: skip
        self._sent = [torch.zeros(2 * count, dtype=torch.int64, pin_memory=self._on_gpu)
                      for _ in range(RING)]  # fmt: skip

    def draw(
        self,
        logits: Tensor,
        slots: IntArray,
        ahead: IntArray,
        ring: int,
        *,
        limited: bool,
        adjusted: bool = False,
        masks: RowMasks | None = None,
        penalised: Tensor | None = None,
    ) -> Tensor:
        """Draw behind the draw and commit of each slot's first row. logits: [N, V]; slots, ahead:
        [N], the slot of each row and the drafts ahead of it; ring: host buffers that are free;
        limited: a slot asks for more than a temperature, adjusted: for some tokens alone or biases;
        masks: of rows with a grammar; penalised: [N] int32, the tokens that rows read, where a slot
        asks for penalties. Returns ``result``, on the host once the step is over."""
        count, state = len(slots), self._state
        host = self._sent[ring][: 2 * count]
        host.numpy()[:count], host.numpy()[count:] = slots, ahead - 1
        places = host.to(self._device, non_blocking=True)
        at, before = places[:count], places[count:]
        temperature = state.temperature.index_select(0, at)
        low, high = state.seed_low.index_select(0, at), state.seed_high.index_select(0, at)
        number = state.num_output.index_select(0, at) + before.to(torch.int32)
        space, rows = self._space, self._rows[:count]
        if limited:
            asked = self._sampler.slots, self._sampler.space
            names = [*_LIMITS, *(_ADJUSTMENTS if adjusted else ())]
            if penalised is not None:
                names += _PENALTIES
            columns = asked[0]._replace(
                **{"asks": self._no_asks, "temperature": temperature, "num_output": number}
                | {name: getattr(asked[0], name).index_select(0, at) for name in names}
            )
            if penalised is not None:
                count_ahead(penalised, before, columns)
            if masks is not None:
                columns.allowed.index_copy_(0, sent(masks.rows, self._device), masks.words)
            adjust_logits(logits, rows, columns, asked[1], self._none, GREEDY_TEMPERATURE)
            keep_floor(logits, rows, low, high, columns, asked[1], GREEDY_TEMPERATURE)
            splits = draw(logits, rows, temperature, low, high, number, space.best, space.token,
                          GREEDY_TEMPERATURE, columns, asked[1])  # fmt: skip
        else:
            splits = draw(logits, rows, temperature, low, high, number, space.best, space.token,
                          GREEDY_TEMPERATURE)  # fmt: skip
        tokens, positions, outputs = self._unread
        commit(space.best, space.token, rows, tokens, positions, outputs, self.result, count,
               splits)  # fmt: skip
        return self._results[ring].copy_(self.result, non_blocking=True)

    def warm_up(self) -> None:
        """Run every kernel once, on rows that are no one's."""
        most = len(self._rows)
        for first, count in ((0, 1), (1, 1), (0, most), (1, most - 1)):
            logits = self._space.logits[first : first + count]
            nothing = np.zeros(count, np.int64)
            for limited, adjusted in ((False, False), (True, False), (True, True)):
                self.draw(logits, nothing, nothing + 1, 0, limited=limited, adjusted=adjusted)
            read = self._rows[:count]
            self.draw(logits, nothing, nothing + 1, 0, limited=True, adjusted=True, penalised=read)
