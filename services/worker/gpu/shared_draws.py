"""The executor of ranks that draw together: each has the logits of its own tokens.

Rows that ask for nothing but a temperature are drawn in the step's graphs, as on one device: of
each rank's tokens the best, and of the bests the best (``RankGpuDecoder.draw``). Logits of all
other rows are gathered, and rank 0 draws from them: over NVLink that takes less time than the many
small launches by which their parts would be chosen apart.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.gpu.sampler_memory import vocab_splits
from penstock.kernels.gpu.shard_draws import own_best
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.executor import MakeDecoder
from penstock.services.worker.gpu.graphs import StepGraphs
from penstock.services.worker.gpu.rank_decoder import RankGpuExecutor, WatchedRanks
from penstock.services.worker.gpu.sent import sent
from penstock.services.worker.slots import PlannedStep


class SharedDrawsExecutor(RankGpuExecutor):
    """Of a rank of the last stage, where that has several."""

    def __init__(
        self,
        capacity: EngineSizes,
        device: torch.device,
        make_decoder: MakeDecoder,
        ranks: WatchedRanks,
    ) -> None:
        super().__init__(capacity, device, make_decoder, ranks)
        self._draws_whole = not ranks.place.share
        parts = capacity.max_num_seqs * vocab_splits(self.decoder.vocab_size)
        with torch.inference_mode():
            self._best = torch.empty(parts, dtype=torch.float32, device=device)
            self._token = torch.empty(parts, dtype=torch.int32, device=device)

    @torch.inference_mode()
    def _run_choices(self, most: int) -> None:
        shape, dtype = (most, self.decoder.vocab_size), self.decoder.space.logits.dtype
        whole = torch.zeros(shape, dtype=dtype, device=self._device)
        nobody = torch.full((most,), -1, dtype=torch.int32, device=self._device)
        index = torch.arange(most, device=self._device)
        for rows in (1, most):
            logits, slots = whole[:rows], nobody[:rows]
            self._draw_gathered(logits, slots, index[:rows])
            if self._draws_whole:
                self.sampler.note(logits, slots)
                self.sampler.stages.warm_up(logits)
                self._logprobs.of_rows(rows)

    def _choose(
        self, graphs: StepGraphs, step: PlannedStep, rows: int, openings: dict[int, int], made: bool
    ) -> None:
        """Rows that ask for more than a temperature are gathered, those alone, and rank 0 draws
        them; what it finds is its best, and the other ranks have none."""
        asking = np.flatnonzero(self.sampler.asking(step.sampled))
        if not len(asking):
            super()._choose(graphs, step, rows, openings, made)
            return
        if not made:
            graphs.run_head(rows)
        index, at = sent(asking, self._device), step.sampled[asking]
        slots, own = sent(at.astype(np.int32), self._device), self.decoder.space.logits[:rows]
        if len(asking) < rows:
            self.decoder.draw_own(rows, self._state.sample_slots[:rows].index_fill(0, index, -1))
            own = own.index_select(0, index)
        logits = self._ranks.columns(own)
        if self._draws_whole:
            self.sampler.plan(at)
            for row, token in openings.items():
                whole = logits[int(np.searchsorted(asking, row))]
                self.sampler.open(int(step.sampled[row]), token, whole)
        self._draw_gathered(logits, slots, index)
        self.decoder.agree(rows)
        if self._draws_whole:
            self.sampler.note(logits, slots)

    def _draw_gathered(self, logits: Tensor, slots: Tensor, at: Tensor) -> None:
        """Make the tokens of these rows the bests of this rank, or say that it has none. logits:
        [n, V]; slots: [n] int32, of each row; at: [n] int64, the step's row of each."""
        splits = 1
        if self._draws_whole:
            splits = self.sampler.draw(logits, slots, self._best, self._token)
        else:
            slots = torch.full_like(slots, -1)
        own_best(
            self._best, self._token, slots, len(slots), splits, self.decoder.own_bests, index=at
        )
