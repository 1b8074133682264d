"""Executes step plans with an encoder: each prompt whole, in one step, and nothing kept of it."""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol

import numpy as np
import torch

from penstock.protocol.pooling import PoolingKind
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.encoders.packed_rows import PackedRows, Prompt, pack
from penstock.services.worker.encoders.pooled import Head, pool
from penstock.services.worker.executor import DirectExecutor
from penstock.services.worker.placement import placement
from penstock.services.worker.pooling import States, pool_rows
from penstock.services.worker.slots import PlannedStep, SlotTable

YIELDING = 10
"""Niceness of steps beside other models on a CPU: who decodes beside them has nine tenths of a core
that both want, and keeps its pace; a batch of texts has whatever else there is."""


class StatesOf(Protocol):
    """``Encoder``, or what stands for it."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, rows: PackedRows) -> torch.Tensor:
        """[N, hidden]."""


class EncoderExecutor(DirectExecutor):
    """An encoder, its head if it classifies, and the slots of the step at hand."""

    def __init__(
        self,
        encoder: StatesOf,
        head: Head | None,
        kind: PoolingKind,
        capacity: EngineSizes,
        dtype: torch.dtype,
        threads: int,
        *,
        yields: bool = False,
    ) -> None:
        """threads: of torch, for a step. yields: other models compute on these cores, and go
        first."""
        super().__init__()
        self.capacity = capacity
        self.device, self.dtype = placement(encoder.device, dtype)
        self.summary = f"an encoder, {threads} threads" if encoder.device.type == "cpu" else ""
        self.generates = False
        self._encoder, self._head, self._kind = encoder, head, kind
        self._slots = SlotTable(capacity)
        self._threads = threads
        self._yields = yields

    def reset(self) -> None:
        super().reset()
        self._slots.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        if self._yields:
            self._yields = False
            # Of this thread, and of those that torch starts from it.
            this = threading.get_native_id()
            niceness = max(YIELDING, os.getpriority(os.PRIO_PROCESS, this))
            os.setpriority(os.PRIO_PROCESS, this, niceness)
        slots = self._slots
        try:
            step = slots.apply(plan)
            values, first = self._values(step), len(step.decoding)
            pooled, failures = pool_rows(
                slots, step, self.tasks, lambda rows: values[np.array(rows) - first],
                generates=False,
            )  # fmt: skip
            tokens = np.zeros(len(step.sampled), np.int32)
            slots.finish(step, tokens)
        except BaseException:
            slots.reset()
            raise
        seconds = time.perf_counter() - begun
        return StepResult(
            plan.epoch, plan.step, tokens.astype("<i4").tobytes(), [], seconds,
            failures=failures, pooled=pooled,
        )  # fmt: skip

    def _values(self, step: PlannedStep) -> States:
        """[prompts, numbers] of a step's prompts, in the order of their rows. Rows of those who
        want tokens, which nobody should have sent here, fail alone."""
        rows = self._slots.task_rows(step)
        if rows and rows[0][0] < len(step.decoding):
            raise ValueError("a slot is planned on behind the end of its prompt")
        if not all(chunk.sample for chunk in step.chunks):
            raise ValueError("an encoder computes whole prompts alone")
        if not step.chunks:
            return np.empty((0, 0), np.float32)
        prompts = [
            Prompt(chunk.tokens, int(self._slots.second[chunk.slot])) for chunk in step.chunks
        ]
        return self.compute(prompts)

    def compute(self, prompts: list[Prompt]) -> States:
        """[prompts, numbers] in their order: pooled states, or logits."""
        if torch.get_num_threads() != self._threads:  # each thread that calls has its own number
            torch.set_num_threads(self._threads)
        with torch.inference_mode():
            rows = pack(prompts, self._encoder.device)
            pooled = pool(self._encoder(rows), rows, self._kind)
            if self._head is not None:
                pooled = self._head(pooled)
            found: States = pooled.float().cpu().numpy()
        values = np.empty_like(found)
        values[rows.order] = found
        return values
