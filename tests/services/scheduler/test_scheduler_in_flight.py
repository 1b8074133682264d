"""How many steps are planned ahead."""

from __future__ import annotations

import pytest

from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.planner import Step


@pytest.mark.parametrize(
    ("seconds", "planned"), [(0.0, 4), (0.0005, 4), (0.001, 3), (0.002, 2), (1.0, 2)]
)
def test_short_steps_are_planned_further_ahead(seconds: float, planned: int) -> None:
    steps = StepsInFlight(2, 4)
    for _ in range(50):
        steps.took(seconds)
    number = 0
    while not steps.at_limit:
        number += 1
        steps.push(Step(number))
    assert number == planned


def test_a_step_that_grows_longer_is_planned_less_far_ahead_again() -> None:
    steps = StepsInFlight(2, 4)
    for seconds in [0.0001] * 50 + [0.005] * 50:
        steps.took(seconds)
    for number in (1, 2):
        steps.push(Step(number))
    assert steps.at_limit
