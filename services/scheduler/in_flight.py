"""The steps that are planned and not answered yet, and their numbers."""

from __future__ import annotations

from collections import deque
from math import ceil

from penstock.services.scheduler.planner import Step
from penstock.services.scheduler.sequence import Sequence

ROUND_TRIP_SECONDS = 0.0015
"""From a result to the worker's next plan, at worst: six sleeping threads are woken on the way
(measured on an H200 host: 1.1 to 1.6 ms). Steps that are planned beyond the running one must last
that long, or the device waits."""
_SMOOTHING = 0.2


class StepsInFlight:
    """Unanswered steps, oldest first: ``limit`` of them, up to ``most`` while steps are so short
    that the device would wait for the next plan otherwise. A stop that is found in a result costs
    a token of every step that is planned behind it."""

    def __init__(self, limit: int, most: int) -> None:
        self.steps: deque[Step] = deque()
        self.last = 0
        """Number of the newest step of the epoch."""
        self._least, self._most, self._limit = limit, max(limit, most), limit
        self._seconds = ROUND_TRIP_SECONDS
        self._last_full = 0
        self._full = True

    @property
    def at_limit(self) -> bool:
        return len(self.steps) >= self._limit

    def took(self, seconds: float) -> None:
        """A step took so long in the worker."""
        self._seconds += _SMOOTHING * (seconds - self._seconds)
        needed = 1 + ceil(ROUND_TRIP_SECONDS / max(self._seconds, 1e-6))
        self._limit = min(self._most, max(self._least, needed))

    def push(self, step: Step) -> bool:
        """Note a new step. Returns whether its plan must be full: it then tells the worker to
        drop every slot first."""
        self.steps.append(step)
        self.last = step.number
        full, self._full = self._full, False
        if full:
            self._last_full = step.number
        return full

    def find(self, number: int) -> Step | None:
        """The unanswered step of this number."""
        return next((step for step in self.steps if step.number == number), None)

    def matters(self, number: int) -> bool:
        """Whether a failure of this step, answered or not, says something about the slots: one
        from before the last full plan does not."""
        return self._last_full <= number <= self.last

    def forget(self, sequence: Sequence) -> None:
        """Ignore what unanswered steps will say about a sequence."""
        sequence.in_flight = 0
        for step in self.steps:
            step.rows = [None if row is sequence else row for row in step.rows]

    def clear(self) -> list[Step]:
        """Forget all; the next plan is full. Returns what was unanswered."""
        steps = list(self.steps)
        self.steps.clear()
        self._full = True
        return steps

    def new_epoch(self) -> None:
        """Numbers begin anew."""
        self.last = self._last_full = 0
        self._full = True
