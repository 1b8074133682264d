"""Rows with stages in the memory of the sampler's kernels."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from support.kernels.triton_device import DEVICE

from penstock.kernels.draw_keys import draw_bases
from penstock.kernels.gpu.sampler_memory import (
    ASKS_STAGES,
    MOST_STAGES,
    STAGE_NUMBERS,
    sampler_slots,
    sampler_space,
)
from penstock.kernels.gpu.sampler_stages import sampler_stages
from penstock.kernels.gpu.tail_free_rows import tail_free_rows
from penstock.kernels.sampling import Stage
from penstock.kernels.sampling.samplers import SAMPLERS


class StagedRows:
    """Row i has the stages of slot ``order[i]``; one row more belongs to no slot."""

    def __init__(self, stages: list[Sequence[Stage]], vocab: int, bound: float = 6.0) -> None:
        count = len(stages)
        self.order = np.random.default_rng(3).permutation(count)
        kinds = np.zeros((count, MOST_STAGES), np.int32)
        values = np.zeros((count, MOST_STAGES, STAGE_NUMBERS), np.float32)
        self._shares = np.zeros(count, np.float32)
        for row, slot in enumerate(self.order.tolist()):
            for place, stage in enumerate(stages[row]):
                kinds[slot, place] = SAMPLERS[stage.sampler].number
                values[slot, place, : len(stage.values)] = stage.values
                if stage.sampler == "tfs":
                    self._shares[row] = stage.values[0]
        lengths = [len(stages[row]) for row in np.argsort(self.order)]
        asks = [ASKS_STAGES if length else 0 for length in lengths]

        def moved(found: object, kind: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.as_tensor(np.asarray(found)).to(kind).to(DEVICE)

        self.slots = sampler_slots(
            count, vocab, 1, DEVICE,
            asks=moved(asks), stage_count=moved(lengths), stage_kind=moved(kinds),
            stage_value=moved(values, torch.float32),
            bound=torch.full((count,), bound, device=DEVICE),
            num_output=moved(np.argsort(self.order)),
        )  # fmt: skip
        self.space = sampler_space(count + 1, vocab, DEVICE, 64)
        self.rows = moved([*self.order.tolist(), -1])
        bases = draw_bases(np.ones(count, np.uint64), np.zeros(count, np.uint64))
        words = np.stack((bases & np.uint64(0xFFFFFFFF), bases >> np.uint64(32)))
        self.seeds = moved(words.astype(np.uint32).view(np.int32))

    def run(self, logits: np.ndarray) -> np.ndarray:
        """What the stages leave of rows [N, V]; the row of no slot stays as it is."""
        vocab = logits.shape[1]
        self.space.adjusted[:-1].copy_(torch.from_numpy(logits))
        self.space.adjusted[-1].fill_(7.0)
        sampler_stages(self.rows, len(self.rows), *self.seeds, self.slots, self.space)
        sorts = np.flatnonzero(self._shares)
        if len(sorts):
            shares = torch.from_numpy(self._shares[sorts]).to(DEVICE)
            tail_free_rows(self.space.adjusted, torch.from_numpy(sorts).to(DEVICE), shares)
            sampler_stages(self.rows, len(self.rows), *self.seeds, self.slots, self.space, True)
        found = self.space.adjusted.cpu().numpy()
        assert (found[-1, :vocab] == 7.0).all()
        return found[:-1]
