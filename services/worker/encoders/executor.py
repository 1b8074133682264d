"""Executes step plans with an encoder: each prompt whole, in one step, and nothing kept of it."""

from __future__ import annotations

import os
import threading
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from penstock.protocol.pooling import PoolingKind
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.encoders.packed_rows import PackedRows, Prompt, pack
from penstock.services.worker.encoders.pooled import Head, pool
from penstock.services.worker.encoders.throttle import Throttle
from penstock.services.worker.executor import DirectExecutor
from penstock.services.worker.gpu.kernel_choice import short
from penstock.services.worker.placement import placement
from penstock.services.worker.pooling import States, pool_rows
from penstock.services.worker.slots import PlannedStep, SlotTable

if TYPE_CHECKING:
    from penstock.services.worker.encoders.gpu_steps import GpuSteps

YIELDING = 10
"""Niceness of steps beside other models on a CPU: who decodes beside them has nine tenths of a core
that both want, and keeps its pace; a batch of texts has whatever else there is."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""By how much kernels may differ from torch, relative to the largest number of a prompt."""


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
        self._encoder_dtype = dtype
        self._on_gpu: GpuSteps | None = None
        self._throttle: Throttle | None = None

    def use_kernels(self, throttle: Throttle | None) -> str:
        """Compute by the kernels for GPUs from now on. throttle: of steps beside others who compute
        on the device. Returns why not, where they fail or differ from torch on prompts made up."""
        from penstock.services.worker.encoders.gpu_steps import GpuSteps

        prompts = _made_up_prompts(self.capacity)
        wanted, sizes = self.compute(prompts), self.capacity
        try:
            steps = GpuSteps(
                self._encoder, self._head, self._kind, sizes.max_num_batched_tokens,
                sizes.max_num_seqs,
            )  # fmt: skip
            found = [steps.compute(prompts), steps.compute(prompts[-1:])]
        except Exception as failure:  # of a compiler, a driver or a launch
            return short(failure)
        apart = max(_apart(found[0], wanted), _apart(found[1], wanted[-1:]))
        if not apart <= _TOLERANCE[self._encoder_dtype]:
            return f"their numbers differ from torch's by {apart:.2g}"
        self._on_gpu, self._throttle = steps, throttle
        graphs = f"no graphs: {steps.why_none}" if steps.why_none else "graphs"
        self.summary = f"an encoder, attention by our kernel, {graphs}"
        return ""

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
        if self._on_gpu is not None:
            begun = time.perf_counter()
            computed = self._on_gpu.compute(prompts)
            if self._throttle is not None:
                self._throttle.after(sum(len(prompt.tokens) for prompt in prompts), begun)
            return computed
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


def _made_up_prompts(sizes: EngineSizes) -> list[Prompt]:
    """A few of various lengths, that are more than a tile and less than one."""
    lengths = [min(length, sizes.max_model_len) for length in (70, 1, 9)][: sizes.max_num_seqs]
    most = min(sizes.vocab_size or 1, 1000)
    return [Prompt((np.arange(length) * 7 % most).astype(np.int32)) for length in lengths]


def _apart(found: States, wanted: States) -> float:
    """The largest difference, in parts of the largest number of a row; NaN where one is none."""
    largest = np.abs(wanted).max(-1, keepdims=True)
    return float((np.abs(found - wanted) / np.maximum(largest, 1e-6)).max())
