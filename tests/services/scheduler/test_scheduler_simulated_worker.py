"""The simulated worker itself: it must see what is wrong with a plan."""

from __future__ import annotations

import msgspec
import pytest
from support.scheduler.scheduler_harness import ROOMY, Engine
from support.scheduler.simulated_worker import BrokenRule, SimulatedWorker, token_bytes

from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan, StepResult

SAMPLING = SlotSampling(1.0, 0, 1.0, 0)


def new_slot(slot: int, tokens: list[int], computed: int = 0, blocks: list[int] = []) -> NewSlot:  # noqa: B006
    sent = token_bytes(tokens[computed:])
    return NewSlot(slot, sent, len(tokens), computed, blocks, SAMPLING.packed(), start=computed)


def first_plan(**changes: object) -> StepPlan:
    plan = StepPlan(
        epoch=1,
        step=1,
        full=True,
        gone=[],
        added=[new_slot(0, [1, 2, 3, 4, 5])],
        grown=[],
        chunks=[Chunk(0, 0, 5, True, [0, 1])],
    )
    return msgspec.structs.replace(plan, **changes)


def next_plan(**changes: object) -> StepPlan:
    return msgspec.structs.replace(
        first_plan(step=2, full=False, added=[], chunks=[]),
        **changes,
    )


def test_a_right_plan_is_executed() -> None:
    worker = SimulatedWorker(ROOMY, 1)
    assert isinstance(worker.execute(first_plan()), StepResult)
    assert isinstance(worker.execute(next_plan()), StepResult)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"full": False, "step": 2}, "was due"),
        ({"gone": [1], "full": True}, "without slots"),
        ({"chunks": [Chunk(0, 0, 5, False, [0, 1])]}, "sample"),
        ({"chunks": [Chunk(0, 0, 5, True, [0])]}, "blocks"),
        ({"chunks": [Chunk(0, 0, 5, True, [0, 0])]}, "twice"),
        ({"chunks": [Chunk(0, 0, 5, True, [0, 256])]}, "no block"),
        ({"chunks": [Chunk(0, 1, 4, True, [0, 1])]}, "starts at 1"),
        ({"chunks": [Chunk(1, 0, 5, True, [0, 1])]}, "not in use"),
        ({"chunks": []}, "computes nothing"),
        ({"added": [new_slot(0, [1, 2, 3, 4, 5], 4, [9])], "chunks": [Chunk(0, 4, 1, True, [1])]},
         "never computed"),
        ({"added": [new_slot(0, [1, 2]), new_slot(1, [3, 4])],
          "chunks": [Chunk(0, 0, 2, True, [0]), Chunk(1, 0, 2, True, [0])]}, "is written while"),
    ],
)  # fmt: skip
def test_a_wrong_first_plan_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(BrokenRule, match=words):
        SimulatedWorker(ROOMY, 1).execute(first_plan(**changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"step": 3}, "was due"),
        ({"full": True}, "without a reason"),
        ({"gone": [3]}, "not in use"),
        ({"grown": [0, 7]}, "before it needed"),
        ({"added": [new_slot(0, [1])]}, "in use"),
        ({"added": [new_slot(1, [7, 8])], "chunks": [Chunk(1, 0, 2, True, [1])]}, "two places"),
        ({"added": [new_slot(1, [1, 2, 3, 4, 9], 4, [0])], "grown": [1, 5],
          "chunks": [Chunk(1, 4, 1, True, [2])]}, "does not decode"),
        ({"added": [new_slot(1, [*range(1, 9), 9], 8, [0, 1])],
          "chunks": [Chunk(1, 8, 1, True, [2])]}, "never computed"),
    ],
)  # fmt: skip
def test_a_wrong_later_plan_is_refused(changes: dict[str, object], words: str) -> None:
    worker = SimulatedWorker(ROOMY, 1)
    worker.execute(first_plan())
    with pytest.raises(BrokenRule, match=words):
        worker.execute(next_plan(**changes))


def test_a_prefix_hit_on_other_tokens_is_seen() -> None:
    worker = SimulatedWorker(ROOMY, 1)
    worker.execute(first_plan())
    tokens = [9, 2, 3, 4, 9]
    hit = next_plan(added=[new_slot(1, tokens, 4, [0])], chunks=[Chunk(1, 4, 1, True, [2])])
    with pytest.raises(BrokenRule, match="not its own"):
        worker.execute(hit, {1: tokens})


def test_a_block_that_is_overwritten_while_in_use_is_seen() -> None:
    worker = SimulatedWorker(ROOMY, 1)
    worker.execute(first_plan())
    stolen = next_plan(added=[new_slot(1, [7, 8, 9, 7])], chunks=[Chunk(1, 0, 4, True, [0])])
    with pytest.raises(BrokenRule, match="not its own"):
        worker.execute(stolen)


def test_a_decode_row_without_a_block_for_its_position_is_seen() -> None:
    worker = SimulatedWorker(ROOMY, 1)
    worker.execute(first_plan())
    for step in (2, 3, 4):
        worker.execute(next_plan(step=step))
    with pytest.raises(BrokenRule, match="behind the block table"):
        worker.execute(next_plan(step=5))


def test_after_a_failed_step_only_a_full_plan_is_executed() -> None:
    engine = Engine()
    engine.worker.fail_steps[1] = "device lost"
    engine.submit(1, [1, 2, 3])
    engine.plan()
    executed = engine.worker.executed
    engine.plan()
    assert engine.worker.executed == executed == 0
    engine.deliver()
    plan = engine.plan()
    assert plan is not None and plan.full
    assert engine.worker.executed == 1
