"""The device's intervals on the host's clock, with events of a device whose clock is known."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, cast

import pytest
from support.worker.recorded_steps import recorded, recording

from penstock.protocol.process.trace import DEVICE, STEP
from penstock.services.worker.gpu.step_times import StepTimes


class At:
    """An event that passed at a nanosecond of the device's own clock."""

    def __init__(self, at: int) -> None:
        self._at = at

    def elapsed_time(self, later: At) -> float:
        """Milliseconds, as ``torch.cuda.Event`` gives them."""
        return (later._at - self._at) / 1e6


@pytest.fixture(autouse=True)
def recorder() -> Iterator[None]:
    with recording():
        yield


def add(times: StepTimes, step: int, begun: int, ended: int) -> None:
    times.add(step, cast(Any, At(begun)), cast(Any, At(ended)))


def test_steps_keep_their_lengths_and_pauses_and_end_before_their_results() -> None:
    times, now = StepTimes(), time.monotonic_ns()
    device = 5_000_000_000_000  # its clock has nothing to do with the host's
    for step in range(4):
        add(times, step, device + step * 1000, device + step * 1000 + 900)
    found = recorded()
    assert [(name, lane, step) for _, _, name, lane, step in found] == [
        (STEP, DEVICE, step) for step in range(4)
    ]
    assert all(0 <= end - start <= 900 for start, end, *_ in found)
    assert all(now - 10_000 < end <= time.monotonic_ns() for _, end, *_ in found)
    for (_, end, *_), (start, *_) in pairwise(found):
        assert start >= end


def test_an_old_setting_of_the_clock_is_not_used_again() -> None:
    times = StepTimes()
    add(times, 1, 0, 1000)
    an_hour = 3_600_000_000_000
    add(times, 2, an_hour, an_hour + 1000)
    now = time.monotonic_ns()
    (_, second) = recorded()
    assert second[1] - second[0] == 1000
    assert now - 1_000_000_000 < second[1] <= now
