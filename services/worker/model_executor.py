"""Executes step plans with a real model, on the CPU or on a CUDA device."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import torch

from penstock.kernels.attention import KV_TILE, ROW_MULTIPLE, CacheShape
from penstock.kernels.kv_cache import allocate_kv_cache, clear_blocks
from penstock.kernels.linear import PACKED_ROW_MINIMUM
from penstock.kernels.sampling import SamplingRows, choose
from penstock.protocol.messages.steps import StepPlan, StepResult
from penstock.protocol.sampling import GREEDY_TEMPERATURE
from penstock.services.worker.adjustments import SlotAdjuster
from penstock.services.worker.executor import DirectExecutor, ExecutorCapacity
from penstock.services.worker.memory import EXTRA_BLOCKS
from penstock.services.worker.models.decoder import Decoder, KVCache
from penstock.services.worker.slots import PlannedStep, SlotTable
from penstock.services.worker.step_inputs import InputBuilder, RowPadding


class ModelExecutor(DirectExecutor):
    """A decoder, its KV memory and its slots.

    In fp32 on the CPU a step has as many rows as give a row of a matrix product the same bits in
    every step: two or more with packed weights, else a multiple of ``ROW_MULTIPLE`` (oneMKL as
    ``set_up_cpu_libraries`` sets it; measured with 1 to 16 threads). With the kernels' own
    guarantees a sequence's logits are then the same bits whatever the batch, the chunks and the
    cache.
    """

    def __init__(self, model: Decoder, capacity: ExecutorCapacity) -> None:
        """Takes KV memory for ``capacity.num_blocks`` blocks and ``EXTRA_BLOCKS`` more: one that
        padding rows write to, and one that is never written and stands for "no block"."""
        super().__init__()
        self.capacity = capacity
        self.summary = ""
        self._model = model
        config = model.config
        with torch.inference_mode():
            model.prepare(capacity.max_model_len)
        exact = model.dtype == torch.float32 and model.device.type == "cpu"
        padding_block, empty_block = capacity.num_blocks, capacity.num_blocks + 1
        self.slots = SlotTable(capacity, KV_TILE // capacity.block_size, empty_block)
        self._adjuster = SlotAdjuster(capacity.max_num_seqs, config.vocab_size, model.device)
        shape = CacheShape(
            config.num_kv_heads,
            capacity.num_blocks + EXTRA_BLOCKS,
            capacity.block_size,
            config.head_dim,
            config.num_heads,
            exact,
        )
        rows = RowPadding(1, 1)
        if exact:
            packed, plain = RowPadding(1, PACKED_ROW_MINIMUM), RowPadding(ROW_MULTIPLE, 1)
            rows = packed if model.packed else plain
        self._inputs = InputBuilder(self.slots, shape, rows, padding_block, model.device)
        with torch.inference_mode():
            self._keys, self._values = (
                allocate_kv_cache(config.num_layers, *shape[:4], model.dtype, model.device)
                for _ in range(2)
            )
            self._cache: KVCache = list(zip(self._keys, self._values, strict=True))

    def reset(self) -> None:
        super().reset()
        self.slots.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        try:
            with torch.inference_mode():
                step = self.slots.apply(plan)
                self._adjuster.begin(plan.added)
                if self.slots.fresh_blocks:
                    fresh = torch.tensor(self.slots.fresh_blocks, device=self._values.device)
                    clear_blocks(self._values, fresh)
                tokens, bad = self._compute(step)
                self.slots.finish(step, tokens)
        except BaseException:
            self.slots.reset()
            raise
        seconds = time.perf_counter() - begun
        return StepResult(plan.epoch, plan.step, tokens.astype("<i4").tobytes(), bad, seconds)

    def logits(self, plan: StepPlan) -> torch.Tensor:
        """Logits [rows, vocab] of a plan's rows, nothing drawn; ``reset`` comes next."""
        with torch.inference_mode():
            step = self.slots.apply(plan)
            return self.forward(step)[: len(step.sampled)]

    def forward(self, step: PlannedStep) -> torch.Tensor:
        """Logits [rows, vocab]: ``step.sampled`` first, then perhaps padding rows."""
        return self._model.forward(self._inputs.build(step), self._cache)

    def _compute(self, step: PlannedStep) -> tuple[npt.NDArray[np.int32], list[int]]:
        """The sampled token of each row, and the rows whose logits are not finite."""
        rows = len(step.sampled)
        if rows or step.chunks:
            logits = self.forward(step)[:rows]
        if not rows:
            return np.empty(0, np.int32), []
        slots, at = self.slots, step.sampled
        temperature = slots.temperature[at]
        greedy = bool((temperature < GREEDY_TEMPERATURE).all())
        keys = np.zeros(len(at), np.uint64) if greedy else slots.keys(at)
        wanted = SamplingRows(temperature, slots.top_k[at], slots.top_p[at], keys, slots.min_p[at])
        num_output = slots.num_output[at].astype(np.int64)
        adjustments = self._adjuster.adjustments(at, num_output)
        choice = choose(logits, wanted, GREEDY_TEMPERATURE, adjustments)
        # The one wait for the device.
        both = torch.stack((choice.tokens, choice.bad.to(torch.int64))).cpu().numpy()
        self._adjuster.took(at, both[0], num_output)
        return both[0].astype(np.int32), np.flatnonzero(both[1]).tolist()
