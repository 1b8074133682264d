"""How long a step may take before the worker counts as stuck.

The limit is ``FACTOR`` times what the steps so far predict, at least ``SHORTEST_SECONDS``. A step
that computes no more positions than some step before it is predicted to take as long as the
longest of them. One that computes more has no precedent: kernels may be compiled for its shape,
and on a CPU the first prompts of a large model take seconds for each hundred positions. It gets
``NEW_SECONDS`` and ``NEW_SECONDS_PER_POSITION`` on top, which is a model of 7 billion parameters
(14 GFLOP for a position) at 140 GFLOP/s. Sizes only grow to ``--max-num-batched-tokens``, so
there are few such steps.
"""

from __future__ import annotations

from collections import deque

from penstock.protocol.wire.messages.steps import StepPlan

SHORTEST_SECONDS = 10.0
FACTOR = 20.0
NEW_SECONDS = 120.0
NEW_SECONDS_PER_POSITION = 0.1
IMPROVE_LIMIT_SECONDS = 60.0
"""For what a pause is used for."""


class StepLimits:
    """Limits of the steps under way, learnt from those that are over."""

    def __init__(self) -> None:
        self._largest = -1
        """Positions of the largest step that is over; -1 before the first one."""
        self._slowest = 0.0
        """Seconds of the longest step that is over."""
        self._decoding = 0
        """Sequences that decode a token in each step, as far as plans say so."""
        self._under_way: deque[tuple[int, float]] = deque()
        """(positions, limit in seconds), oldest first."""

    def begin(self, plan: StepPlan) -> float:
        """A step begins. Returns the seconds in which it and those before it must be over."""
        self._decoding = 0 if plan.full else max(0, self._decoding - len(plan.gone))
        positions = self._decoding + sum(chunk.count for chunk in plan.chunks)
        self._decoding += sum(chunk.sample for chunk in plan.chunks)
        limit = max(SHORTEST_SECONDS, FACTOR * self._slowest)
        if positions > self._largest:
            limit = max(limit, NEW_SECONDS + NEW_SECONDS_PER_POSITION * positions)
        self._under_way.append((positions, limit))
        return sum(limit for _, limit in self._under_way)

    def over(self, seconds: float) -> None:
        """The oldest step under way took so long."""
        if self._under_way:
            positions, _ = self._under_way.popleft()
            self._largest = max(self._largest, positions)
        self._slowest = max(self._slowest, seconds)

    def drop(self) -> None:
        """The steps under way are given up, and all slots with them."""
        self._under_way.clear()
        self._decoding = 0
