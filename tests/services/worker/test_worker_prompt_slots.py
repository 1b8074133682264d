"""Slots of an engine that computes whole prompts: what a plan says becomes rows, or is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.block_tables import PlanError
from penstock.services.worker.encoders.prompt_slots import PromptSlots

SIZES = EngineSizes(64, 16, 4, 32, 20, 100)
SAMPLING = SlotSampling(0.0, 0, 1.0, 0).packed()


def new(slot: int, tokens: list[int], task: str = "embed", **more: Any) -> NewSlot:
    ids = np.array(tokens, "<i4").tobytes()
    settings: dict[str, Any] = {"prompt_len": len(tokens), "num_computed": 0, "blocks": []}
    return NewSlot(slot=slot, tokens=ids, sampling=SAMPLING, task=task, **settings | more)


def plan(step: int, gone: list[int], added: list[NewSlot], chunks: list[Chunk]) -> StepPlan:
    return StepPlan(1, step, step == 1, gone, added, [], chunks)


def whole(slot: int, count: int) -> Chunk:
    return Chunk(slot, 0, count, True, [])


def test_rows_are_prompts_in_the_order_of_their_chunks_and_slots_are_used_again() -> None:
    slots = PromptSlots(SIZES)
    added = [new(0, [5, 6]), new(3, [7], second=1), new(1, [8, 9])]
    found = slots.apply(plan(1, [], added, [whole(3, 1), whole(0, 2)]))
    assert [list(prompt.tokens) for prompt in found.prompts] == [[7], [5, 6]]
    assert (found.total, found.first, found.named) == (2, 0, {0: "embed", 1: "embed"})
    assert found.prompts[0].second == 1
    found = slots.apply(plan(2, [0, 3], [new(0, [4])], [whole(1, 2), whole(0, 1)]))
    assert [list(prompt.tokens) for prompt in found.prompts] == [[8, 9], [4]]


def test_who_wants_tokens_has_rows_ahead_of_the_prompts_until_it_is_gone() -> None:
    slots = PromptSlots(SIZES)
    assert slots.apply(plan(1, [], [new(2, [1], task="")], [whole(2, 1)])).named == {}
    found = slots.apply(plan(2, [], [new(0, [3])], [whole(0, 1)]))
    assert (found.total, found.first, found.named) == (2, 1, {1: "embed"})
    assert slots.apply(plan(3, [0, 2], [], [])).total == 0


@pytest.mark.parametrize(
    ("added", "chunks", "gone", "said"),
    [
        ([new(4, [1])], [], [], "slots are 0 … 3"),
        ([new(0, [1])], [], [], "it is in use"),
        ([new(1, [100])], [], [], "token ids are 0 … 99"),
        ([new(1, [-1])], [], [], "token ids are 0 … 99"),
        ([new(1, list(range(21)))], [], [], "21 tokens; allowed are 1 … 20"),
        ([new(1, [1, 2], start=1, num_computed=1)], [], [], "whole prompts alone"),
        ([], [whole(1, 1)], [], "not prefilling"),
        ([], [Chunk(0, 0, 1, False, [])], [], "whole prompts alone"),
        ([], [], [1], "nothing is in it"),
        ([new(1, [1] * 20), new(2, [1] * 20)], [whole(1, 20), whole(2, 20)], [], "40 tokens in"),
    ],
)
def test_what_contradicts_the_slots_is_refused(
    added: list[NewSlot], chunks: list[Chunk], gone: list[int], said: str
) -> None:
    slots = PromptSlots(SIZES)
    with pytest.raises(PlanError, match="a full plan is needed"):
        slots.apply(plan(2, [], [], []))
    slots.apply(plan(1, [], [new(0, [1, 2])], []))
    with pytest.raises(PlanError, match=said):
        slots.apply(plan(2, gone, added, chunks))


def test_a_task_is_not_planned_on_behind_its_end() -> None:
    slots = PromptSlots(SIZES)
    slots.apply(plan(1, [], [new(0, [1])], [whole(0, 1)]))
    with pytest.raises(PlanError, match="behind the end"):
        slots.apply(plan(2, [], [], []))
