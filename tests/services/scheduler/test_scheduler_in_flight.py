"""How many steps are planned ahead."""

from __future__ import annotations

import pytest

from penstock.protocol.wire.messages.engine import StepShape
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.planned_step import Step

SHAPE = StepShape(certain_share=0.6, round_trip_seconds=0.0015, lead_seconds=0.015)


@pytest.mark.parametrize(
    ("seconds", "planned"), [(0.0, 4), (0.0005, 4), (0.001, 3), (0.002, 2), (1.0, 2)]
)
def test_short_steps_are_planned_further_ahead(seconds: float, planned: int) -> None:
    steps = StepsInFlight(2, 4, SHAPE)
    for _ in range(50):
        steps.took(seconds, 0.0)
    number = 0
    while not steps.at_limit:
        number += 1
        steps.push(Step(number), 0.0, 0.0)
    assert number == planned


def test_a_step_that_grows_longer_is_planned_less_far_ahead_again() -> None:
    steps = StepsInFlight(2, 4, SHAPE)
    for seconds in [0.0001] * 50 + [0.005] * 50:
        steps.took(seconds, 0.0)
    for number in (1, 2):
        steps.push(Step(number), 0.0, 0.0)
    assert steps.at_limit


def test_behind_long_prefill_the_next_plan_waits_until_shortly_before_its_end() -> None:
    steps = StepsInFlight(2, 4, SHAPE)
    assert not steps.held_for(10.0)
    steps.push(Step(1), 0.1, 10.0)
    ready = 10.0 + SHAPE.certain_share * 0.1 - SHAPE.lead_seconds
    assert steps.held_for(10.0) == pytest.approx(ready - 10.0)
    assert steps.held_for(ready - 0.001) > 0
    assert not steps.held_for(ready + 0.001)


def test_nothing_waits_behind_short_prefill_decoding_or_a_result() -> None:
    steps = StepsInFlight(2, 4, SHAPE)
    steps.push(Step(1), 0.02, 10.0)
    assert not steps.held_for(10.0)
    steps.push(Step(2), 1.0, 10.0)
    assert not steps.held_for(10.0)  # there may be no third
    steps.clear()
    steps.push(Step(3), 0.0, 10.0)
    assert not steps.held_for(10.0)


def test_a_step_begins_when_the_one_ahead_of_it_ends() -> None:
    steps = StepsInFlight(2, 4, SHAPE)
    steps.push(Step(1), 0.0, 10.0)
    steps.push(Step(2), 0.1, 10.0)
    steps.steps.popleft()
    steps.took(0.05, 10.05)
    assert steps.held_for(10.05) == pytest.approx(SHAPE.certain_share * 0.1 - SHAPE.lead_seconds)
