"""The null engine: an executor without a model, so that the pipeline can be measured and hurt.

It keeps the same slots and refuses the same wrong plans as a real one. Its tokens are a function
of (seed, choice, output position), so a continuation produces what the lost engine would have.
Imports no torch.
"""

from __future__ import annotations

import time
from functools import partial

import numpy as np
import numpy.typing as npt

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import StepPlan, StepResult
from penstock.services.worker.executor import DirectExecutor
from penstock.services.worker.pooling import pool_rows
from penstock.services.worker.slots import IntArray, PlannedStep, SlotTable
from penstock.services.worker.step_logprobs import (
    Words,
    asking_chunks,
    asking_rows,
    chunk_logprobs,
    pack_entries,
    row_logprobs,
)


class NullExecutor(DirectExecutor):
    """Answers at once, or ``step_seconds`` after each plan was begun."""

    def __init__(
        self, capacity: EngineSizes, end_tokens: list[int], step_seconds: float = 0.0
    ) -> None:
        """``end_tokens`` are never produced, unless nothing else is left."""
        super().__init__()
        self.capacity = capacity
        self.device, self.dtype, self.summary = "null", "", ""
        self.kv_blocks = None if capacity.groups else NullBlocks()
        self.rests = NullMemory()
        self._slots = SlotTable(capacity)
        self._step_seconds = step_seconds
        skipped = sorted({token for token in end_tokens if 0 <= token < capacity.vocab_size})
        self._skipped = skipped if len(skipped) < capacity.vocab_size else []
        self._choices = np.uint64(capacity.vocab_size - len(self._skipped))

    def reset(self) -> None:
        super().reset()
        self._slots.reset()

    def execute(self, plan: StepPlan) -> StepResult:
        begun = time.perf_counter()
        slots = self._slots
        try:
            step = slots.apply(plan)
        except BaseException:
            slots.reset()
            raise
        tokens = self.draw(step).astype(np.int32)
        rows = asking_rows(slots, step.sampled)
        most = slots.logprobs[step.sampled[rows]]
        logprobs = row_logprobs(_certain(tokens[rows], most), rows, most) if len(rows) else []
        prompts = []
        for _, chunk in asking_chunks(step):
            listed = slots.prompt_logprobs[chunk.slot : chunk.slot + 1]
            words = _certain(chunk.predicted, listed)
            prompts.append(chunk_logprobs(chunk, words, int(listed[0])))
        pooled, failures = pool_rows(
            slots.task_rows(step), len(step.sampled), self.tasks, partial(_hidden, slots, step),
            generates=self.generates,
        )  # fmt: skip
        failures += slots.unreadable_rows(step)
        slots.finish(step, tokens)
        if self._step_seconds:
            time.sleep(max(0.0, begun + self._step_seconds - time.perf_counter()))
        seconds = time.perf_counter() - begun
        ids = tokens.astype("<i4").tobytes()
        return StepResult(
            plan.epoch, plan.step, ids, [], seconds, logprobs, prompts, failures, pooled=pooled
        )

    def draw(self, step: PlannedStep) -> IntArray:
        """The next token of each row of ``step.sampled``."""
        tokens = (self._slots.keys(step.sampled) % self._choices).astype(np.int64)
        for skipped in self._skipped:
            tokens += tokens >= skipped
        return tokens


class NullMemory:
    """What leaves a device that has none."""

    def leave(self) -> None:
        """See ``Rests``."""

    def come_back(self) -> None:
        """See ``Rests``."""


class NullBlocks:
    """Its KV memory, which holds nothing."""

    block_bytes = 64
    layout = "null"

    def read(self, block: int, into: memoryview) -> None:
        """See ``BlockAccess``."""

    def write(self, block: int, content: memoryview) -> None:
        """See ``BlockAccess``."""


def _hidden(slots: SlotTable, step: PlannedStep, rows: list[int]) -> npt.NDArray[np.float32]:
    """[len(rows), 2]: stand for hidden states; a prompt's length and its last token."""
    last = {chunk.slot: chunk.tokens[-1] for chunk in step.chunks}
    at = step.sampled[rows].tolist()
    return np.array([(slots.prompt_length[slot], last[slot]) for slot in at], np.float32)


def _certain(tokens: npt.NDArray[np.int32], most: IntArray) -> Words:
    """Entries of tokens that had to come: nothing else was possible."""
    listed = int(most.max())
    count = len(tokens)
    top_ids = np.broadcast_to(np.arange(listed), (count, listed)).copy()
    top = np.full((count, listed), -np.inf, np.float32)
    if listed:
        top_ids[:, 0], top[:, 0] = tokens, 0.0
    zeros = np.zeros(count, np.float32)
    return pack_entries(tokens, np.ones(count), zeros, top_ids, top)
