"""The steps that are planned and not answered yet, and their numbers."""

from __future__ import annotations

from collections import deque
from math import ceil

from penstock.protocol.wire.messages.engine import StepShape
from penstock.services.scheduler.planned_step import Step
from penstock.services.scheduler.sequence import Sequence

_SMOOTHING = 0.2


class StepsInFlight:
    """Unanswered steps, oldest first: ``limit`` of them, up to ``most`` while steps are so short
    that the device would wait for the next plan otherwise. A stop that is found in a result costs
    a token of every step that is planned behind it.

    While a step computes prefill for long, the next plan waits for those who come meanwhile: made
    at once, it would do without them, and so would the step behind it.
    """

    def __init__(self, limit: int, most: int, shape: StepShape, at_once: int = 1) -> None:
        """at_once: steps that the stages of a pipeline compute beside each other."""
        self._shape = shape
        self._certain_share = shape.certain_share / at_once
        self.steps: deque[Step] = deque()
        self.last = 0
        """Number of the newest step of the epoch."""
        self._least, self._most, self._limit = limit, max(limit, most), limit
        self._seconds = shape.round_trip_seconds
        self._busy_until = 0.0
        """When all that is planned ends at the earliest."""
        self._last_full = 0
        self._full = True

    @property
    def at_limit(self) -> bool:
        return len(self.steps) >= self._limit

    def held_for(self, now: float) -> float:
        """Seconds that the next plan should wait; 0: none, or until a result is there."""
        if not self.steps or self.at_limit:
            return 0.0
        return max(0.0, self._busy_until - self._shape.lead_seconds - now)

    def took(self, seconds: float, now: float) -> None:
        """The oldest step is over; it took so long in the worker."""
        self._busy_until = now + sum(step.least_seconds for step in self.steps)
        self._seconds += _SMOOTHING * (seconds - self._seconds)
        needed = 1 + ceil(self._shape.round_trip_seconds / max(self._seconds, 1e-6))
        self._limit = min(self._most, max(self._least, needed))

    def push(self, step: Step, prefill_seconds: float, now: float) -> bool:
        """Note a new step, whose prefill is predicted to take so long. Returns whether its plan
        must be full: it then tells the worker to drop every slot first."""
        step.least_seconds = self._certain_share * prefill_seconds
        self._busy_until = max(self._busy_until, now) + step.least_seconds
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
        from before the last full plan does not, nor does any while the next plan is full anyway."""
        return not self._full and self._last_full <= number <= self.last

    def forget(self, sequence: Sequence) -> None:
        """Ignore what unanswered steps will say about a sequence."""
        sequence.in_flight = 0
        for step in self.steps:
            step.rows = [None if row is sequence else row for row in step.rows]

    def clear(self) -> list[Step]:
        """Forget all; the next plan is full. Returns what was unanswered."""
        steps = list(self.steps)
        self.steps.clear()
        self._busy_until = 0.0
        self._full = True
        return steps

    def new_epoch(self) -> None:
        """Numbers begin anew."""
        self.last = self._last_full = 0
        self._full = True
