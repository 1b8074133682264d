"""The slots of an engine that computes whole prompts alone, each in one step.

A ``SlotTable`` keeps what is drawn by, where tokens stand and which blocks they have: nothing that
an encoder asks for, and more to write than a short text takes on a GPU.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, StepPlan
from penstock.services.worker.block_tables import PlanError
from penstock.services.worker.encoders.packed_rows import Prompt
from penstock.services.worker.plan_order import PlanOrder


class PlannedPrompts(NamedTuple):
    """What a step computes, and its rows."""

    epoch: int
    step: int
    total: int
    """Rows of the result."""
    first: int
    """The first row that is a prompt's. Those ahead of it are of slots that want further tokens."""
    named: dict[int, str]
    """Task of each row that has one, ascending."""
    prompts: list[Prompt]
    """Of the rows from ``first`` on."""


class PromptSlots:
    """See ``SlotTable``: after a ``PlanError`` or a failed computation call ``reset``."""

    def __init__(self, capacity: EngineSizes) -> None:
        self.capacity = capacity
        self._waiting: dict[int, tuple[Prompt, str]] = {}
        """Prompts, and their tasks, that are to be computed, by their slots."""
        self._done: dict[int, str] = {}
        """Tasks of those that were."""
        self._plans = PlanOrder()

    def reset(self) -> None:
        """Free every slot; the next plan must be full."""
        self._clear()
        self._plans.reset()

    def _clear(self) -> None:
        self._waiting.clear()
        self._done.clear()

    def apply(self, plan: StepPlan) -> PlannedPrompts:
        """Change the slots as the plan says; its prompts are taken as computed. Raises
        ``PlanError``; the slots are then undefined."""
        if plan.full:
            self._clear()
        self._plans.take(plan)
        for slot in plan.gone:
            if self._waiting.pop(slot, None) is None and self._done.pop(slot, None) is None:
                raise PlanError(f"slot {slot} is gone, but nothing is in it")
        for new in plan.added:
            self._add(new)
        if any(self._done.values()):
            raise PlanError("a slot is planned on behind the end of its prompt")
        first, named, prompts = len(self._done), dict[int, str](), list[Prompt]()
        for row, chunk in enumerate(plan.chunks, first):
            prompt, task = self._whole(chunk)
            prompts.append(prompt)
            self._done[chunk.slot] = task
            if task:
                named[row] = task
        total, tokens = first + len(prompts), sum(len(prompt.tokens) for prompt in prompts)
        budget = max(self.capacity.max_num_batched_tokens, self.capacity.max_num_seqs)
        if first + tokens > budget:
            raise PlanError(f"{tokens} tokens in one step; max_num_batched_tokens is {budget}")
        return PlannedPrompts(plan.epoch, plan.step, total, first, named, prompts)

    def _add(self, new: NewSlot) -> None:
        slot, limits = new.slot, self.capacity
        if not 0 <= slot < limits.max_num_seqs:
            raise PlanError(f"slot {slot}: slots are 0 … {limits.max_num_seqs - 1}")
        if slot in self._waiting or slot in self._done:
            raise PlanError(f"slot {slot} is added, but it is in use")
        if len(new.tokens) % 4:
            raise PlanError(f"slot {slot}: tokens are int32, got {len(new.tokens)} bytes")
        tokens = np.frombuffer(new.tokens, "<i4")
        if not 1 <= len(tokens) <= limits.max_model_len:
            raise PlanError(
                f"slot {slot}: {len(tokens)} tokens; allowed are 1 … {limits.max_model_len}"
            )
        if int(tokens.view(np.uint32).max()) >= limits.vocab_size:  # negative ones are the highest
            raise PlanError(f"slot {slot}: token ids are 0 … {limits.vocab_size - 1}")
        if new.start or new.num_computed:
            raise PlanError(f"slot {slot}: an encoder computes whole prompts alone")
        self._waiting[slot] = Prompt(tokens, new.second), new.task

    def _whole(self, chunk: Chunk) -> tuple[Prompt, str]:
        found = self._waiting.pop(chunk.slot, None)
        if found is None:
            raise PlanError(f"slot {chunk.slot}: a chunk for a slot that is not prefilling")
        if chunk.start or chunk.count != len(found[0].tokens) or not chunk.sample:
            raise PlanError(f"slot {chunk.slot}: an encoder computes whole prompts alone")
        return found
