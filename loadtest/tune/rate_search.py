"""The highest rate of requests at which the objective is kept."""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.loadtest.tune.load_level import Level

FACTOR = 2.5
"""From one rate to the next, until one is kept and one is not."""
NEAR = 1.25
"""A rate is found when one that is so many times as high is not kept."""
MOST_LEVELS = 9


class RateSearch:
    """Tries rates, each with a load of its own."""

    def __init__(
        self,
        measure: Callable[[float], Level],
        keeps: Callable[[Level], bool],
        may_go_on: Callable[[], bool],
    ) -> None:
        """may_go_on: whether there is time for another load."""
        self._measure, self._keeps, self._may_go_on = measure, keeps, may_go_on
        self.low: Level | None = None
        """The highest rate that was kept, …"""
        self.high: Level | None = None
        """… and the lowest one above it that was not."""
        self.cut = False
        """Whether time ended the search."""

    def run(self, first: float, least: float) -> None:
        """first: the rate to begin with; below ``least`` none is tried. Requests a second."""
        rate = max(first, least)
        for _ in range(MOST_LEVELS):
            if not self._may_go_on():
                self.cut = True
                return
            level = self._measure(rate)
            if level.is_cut:
                self.cut = True
                return
            if self._keeps(level):
                self.low = level
            else:
                self.high = level
            if self._found():
                return
            rate = self._next(rate)
            if rate < least:
                return
        self.cut = True

    def _found(self) -> bool:
        return bool(self.low and self.high and self.high.rate <= NEAR * self.low.rate)

    def _next(self, rate: float) -> float:
        if self.low and self.high:
            return math.sqrt(self.low.rate * self.high.rate)
        return rate * FACTOR if self.low else rate / FACTOR
