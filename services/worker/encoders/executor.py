"""Executes step plans with an encoder: each prompt whole, in one step, and nothing kept of it."""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch

from penstock.protocol.pooling import PoolingKind
from penstock.protocol.process.trace import DEVICE, STEP, TRACE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.cpu_threads import ThreadReview, candidates
from penstock.services.worker.encoders.encoder import Encoder
from penstock.services.worker.encoders.packed_rows import PackedRows, Prompt, pack
from penstock.services.worker.encoders.pooled import Head, pool
from penstock.services.worker.encoders.prompt_slots import PlannedPrompts, PromptSlots
from penstock.services.worker.encoders.short_steps import (
    MEASURED_ROWS,
    SHORT_ROWS,
    ShortStepChoice,
    ShortStepTrial,
)
from penstock.services.worker.encoders.throttle import Throttle
from penstock.services.worker.executor import DirectExecutor
from penstock.services.worker.gpu.kernel_choice import short
from penstock.services.worker.placement import placement
from penstock.services.worker.pooling import States, pool_rows

if TYPE_CHECKING:
    from penstock.services.worker.encoders.gpu_steps import GpuSteps, StartedStep

YIELDING = 10
"""Niceness of steps beside other models on a CPU: who decodes beside them has nine tenths of a core
that both want, and keeps its pace; a batch of texts has whatever else there is."""

_TOLERANCE = {torch.float32: 1e-3, torch.float16: 2e-2, torch.bfloat16: 1e-1}
"""By how much kernels may differ from torch, relative to the largest number of a prompt."""

_NOTHING: States = np.empty((0, 0), np.float32)
_SPLIT_TOLERANCE = 1e-4
"""Likewise, where products are computed from bfloat16 parts."""


class StatesOf(Protocol):
    """``Encoder``, or what stands for it."""

    @property
    def device(self) -> torch.device: ...

    def __call__(self, rows: PackedRows) -> torch.Tensor:
        """[N, hidden]."""


class _Started(NamedTuple):
    planned: PlannedPrompts
    step: StartedStep
    launched: int
    """Nanoseconds of the monotonic clock."""


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
        self.summary = _threads_of(threads) if encoder.device.type == "cpu" else ""
        self.generates = False
        self._encoder, self._head, self._kind = encoder, head, kind
        self._slots = PromptSlots(capacity)
        self._threads = self._short_threads = threads
        self._review: ThreadReview[ShortStepChoice] | None = None
        self._yields = yields
        self._encoder_dtype = dtype
        self._on_gpu: GpuSteps | None = None
        self._started: deque[_Started] = deque()
        self._last_end = 0
        self._throttle: Throttle | None = None

    def measure_short_steps(self) -> None:
        """Find out how many threads compute steps of few rows, now and again in pauses."""
        prompt = made_up_prompt(self.capacity, MEASURED_ROWS)
        trial = ShortStepTrial(
            lambda threads: self._with_threads([prompt], threads), candidates(self._threads)
        )
        self._use(trial.start())
        self._review = ThreadReview(trial)

    def _use(self, choice: ShortStepChoice) -> None:
        self._short_threads = choice.threads
        self.summary = f"{_threads_of(self._threads)}; {choice}"

    def improve(self, now: float, pause: float) -> bool:
        if self._review is None:
            return False
        more = self._review.go_on(now, pause)
        if not more and self._review.choice.threads != self._short_threads:
            self._use(self._review.choice)
        return more

    def use_kernels(self, throttle: Throttle | None) -> str:
        """Compute by the kernels for GPUs from now on. throttle: of steps beside others who compute
        on the device. Returns why not, where they fail or differ from torch on prompts made up."""
        prompts = _made_up_prompts(self.capacity)
        wanted = self.compute(prompts)
        reason = _with_split_linears(self._encoder)
        if not isinstance(reason, str):
            reason = self._use_steps(reason, prompts, wanted, _SPLIT_TOLERANCE)
        plain = reason
        if plain:
            tolerance = _TOLERANCE[self._encoder_dtype]
            reason = self._use_steps(self._encoder, prompts, wanted, tolerance)
        if reason or self._on_gpu is None:
            return reason
        self._throttle = throttle
        none = self._on_gpu.why_none
        graphs = f"no graphs: {none}" if none else "graphs"
        products = f"torch's products: {plain}" if plain else "products of two bfloat16 parts"
        self.summary = f"an encoder, attention by our kernel, {products}, {graphs}"
        return ""

    def _use_steps(
        self, encoder: StatesOf, prompts: list[Prompt], wanted: States, tolerance: float
    ) -> str:
        """Compute by kernels and this encoder from now on. Returns why not."""
        from penstock.services.worker.encoders.gpu_steps import MOST_STARTED, GpuSteps

        sizes = self.capacity
        try:
            steps = GpuSteps(
                encoder, self._head, self._kind, sizes.max_num_batched_tokens, sizes.max_num_seqs
            )
            found = [steps.compute(prompts), steps.compute(prompts[-1:])]
        except Exception as failure:  # of a compiler, a driver or a launch
            return short(failure)
        apart = max(_apart(found[0], wanted), _apart(found[1], wanted[-1:]))
        if not apart <= tolerance:
            return f"their numbers differ from torch's by {apart:.2g}"
        self._encoder, self._on_gpu, self.max_in_flight = encoder, steps, MOST_STARTED
        return ""

    def reset(self) -> None:
        while self._started:
            self._started.popleft().step.values()  # what it reads and writes is another's by then
        super().reset()
        self._slots.reset()

    @property
    def in_flight(self) -> int:
        return len(self._started) + super().in_flight

    def launch(self, plan: StepPlan) -> None:
        if self._on_gpu is None or self._throttle is not None:
            super().launch(plan)
            return
        launched = time.monotonic_ns()
        try:
            planned = self._slots.apply(plan)
            started = self._on_gpu.start(planned.prompts)
        except BaseException:
            self._slots.reset()
            raise
        self._started.append(_Started(planned, started, launched))

    def finished(self, wait: bool = False) -> StepResult | None:
        if not self._started:
            return super().finished(wait)
        if not (wait or self._started[0].step.is_over):
            return None
        planned, step, launched = self._started.popleft()
        values, now = step.values(), time.monotonic_ns()
        began, self._last_end = max(launched, self._last_end), now
        if TRACE.on:
            TRACE.add(STEP, began, planned.step, DEVICE, now)
        return self._result(planned, values, (now - began) * 1e-9)

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        if self._yields:
            self._yields = False
            # Of this thread, and of those that torch starts from it.
            this = threading.get_native_id()
            niceness = max(YIELDING, os.getpriority(os.PRIO_PROCESS, this))
            os.setpriority(os.PRIO_PROCESS, this, niceness)
        try:
            planned = self._slots.apply(plan)
            values = self.compute(planned.prompts) if planned.prompts else _NOTHING
        except BaseException:
            self._slots.reset()
            raise
        return self._result(planned, values, time.perf_counter() - begun)

    def _result(self, step: PlannedPrompts, values: States, seconds: float) -> StepResult:
        """values: [prompts, numbers], in the order of their rows. Rows of those who want tokens,
        which nobody should have sent here, fail alone."""
        pooled, failures = pool_rows(
            step.named, step.total, self.tasks, lambda rows: values[np.array(rows) - step.first],
            generates=False,
        )  # fmt: skip
        return StepResult(
            step.epoch, step.step, bytes(4 * step.total), [], seconds, failures=failures,
            pooled=pooled,
        )  # fmt: skip

    def compute(self, prompts: list[Prompt]) -> States:
        """[prompts, numbers] in their order: pooled states, or logits."""
        if self._on_gpu is not None:
            begun = time.perf_counter()
            computed = self._on_gpu.compute(prompts)
            if self._throttle is not None:
                self._throttle.after(sum(len(prompt.tokens) for prompt in prompts), begun)
            return computed
        is_short = sum(len(prompt.tokens) for prompt in prompts) <= SHORT_ROWS
        if self._review is not None:
            self._review.used()
        return self._with_threads(prompts, self._short_threads if is_short else self._threads)

    def _with_threads(self, prompts: list[Prompt], threads: int) -> States:
        if torch.get_num_threads() != threads:  # each thread that calls has its own number
            torch.set_num_threads(threads)
        with torch.inference_mode():
            rows = pack(prompts, self._encoder.device)
            pooled = pool(self._encoder(rows), rows, self._kind)
            if self._head is not None:
                pooled = self._head(pooled)
            found: States = pooled.float().cpu().numpy()
        values = np.empty_like(found)
        values[rows.order] = found
        return values


def _with_split_linears(encoder: StatesOf) -> Encoder | str:
    """The encoder with ``SplitLinear``; or why it stays as it is."""
    from penstock.services.worker.encoders.split_linear import SplitLinear, why_not_split

    if not isinstance(encoder, Encoder):
        return "a decoder's layers"
    try:
        with torch.inference_mode():
            return why_not_split(encoder.linears.up) or encoder.with_linears(SplitLinear)
    except Exception as failure:  # of a compiler, a driver or a launch
        return short(failure)


def _threads_of(count: int) -> str:
    return f"an encoder, {count} thread{'s' if count > 1 else ''}"


def _made_up_prompts(sizes: EngineSizes) -> list[Prompt]:
    """A few of various lengths, that are more than a tile and less than one."""
    return [made_up_prompt(sizes, length) for length in (70, 1, 9)][: sizes.max_num_seqs]


def made_up_prompt(sizes: EngineSizes, length: int) -> Prompt:
    """Of so many tokens, or as many as there may be."""
    most = min(sizes.vocab_size or 1, 1000)
    return Prompt((np.arange(min(length, sizes.max_model_len)) * 7 % most).astype(np.int32))


def _apart(found: States, wanted: States) -> float:
    """The largest difference, in parts of the largest number of a row; NaN where one is none."""
    largest = np.abs(wanted).max(-1, keepdims=True)
    return float((np.abs(found - wanted) / np.maximum(largest, 1e-6)).max())
