"""A stuck step is told from a slow one by what the steps before it took."""

from __future__ import annotations

from penstock.protocol.wire.messages.steps import Chunk, StepPlan
from penstock.services.worker.step_limit import (
    NEW_SECONDS,
    NEW_SECONDS_PER_POSITION,
    SHORTEST_SECONDS,
    StepLimits,
)


def plan(*prefills: int, full: bool = False, gone: int = 0) -> StepPlan:
    chunks = [Chunk(slot, 0, count, True, []) for slot, count in enumerate(prefills)]
    return StepPlan(1, 1, full, list(range(gone)), [], [], chunks)


def test_the_first_step_and_any_larger_one_have_time_to_compile() -> None:
    limits = StepLimits()
    assert limits.begin(plan(100, full=True)) == NEW_SECONDS + 100 * NEW_SECONDS_PER_POSITION
    limits.over(1.0)
    assert limits.begin(plan(2000)) >= NEW_SECONDS + 2000 * NEW_SECONDS_PER_POSITION


def test_a_step_that_is_no_larger_than_one_before_gets_twenty_times_the_longest() -> None:
    limits = StepLimits()
    limits.begin(plan(100, full=True))
    limits.over(0.05)
    assert limits.begin(plan(50)) == SHORTEST_SECONDS
    limits.over(3.0)
    assert limits.begin(plan()) == 60.0


def test_a_step_behind_a_large_one_may_wait_for_it() -> None:
    limits = StepLimits()
    limits.begin(plan(8, full=True))
    limits.over(0.1)
    large = limits.begin(plan(4096))
    assert limits.begin(plan()) == large + SHORTEST_SECONDS
    limits.over(20.0)
    limits.over(0.1)
    assert limits.begin(plan()) == 400.0


def test_decoding_rows_count_as_positions() -> None:
    limits = StepLimits()
    limits.begin(plan(1, 1, 1, full=True))
    limits.over(0.01)
    assert limits.begin(plan()) == SHORTEST_SECONDS  # three rows, as before
    limits.over(0.01)
    assert limits.begin(plan(1)) > NEW_SECONDS
    limits.over(0.01)
    assert limits.begin(plan(gone=4)) == SHORTEST_SECONDS


def test_steps_that_are_given_up_leave_no_limit_behind() -> None:
    limits = StepLimits()
    limits.begin(plan(8, full=True))
    limits.over(0.1)
    limits.begin(plan(4096))
    limits.drop()
    assert limits.begin(plan(8, full=True)) == SHORTEST_SECONDS
