"""How many threads compute a step of few rows on a CPU.

Every product of a step ends with all threads waiting for the slowest, and begins with waking those
that sleep. For a short text that takes as long as a second thread saves, and where other processes
use the cores, many times as long: a text of 37 tokens to all-MiniLM-L6 took 17 ms of processor time
with one thread and 43 ms with two, on two busy cores. So the number is measured, as for models that
generate (``cpu_threads.py``); steps of many rows have all cores.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from penstock.services.worker.cpu_threads import HOPELESS, Clock, preferred

SHORT_ROWS = 64
"""A step of more rows has all threads."""
MEASURED_ROWS = 32
STEPS = 3
"""Measured in each look with each number of threads, after one that wakes them."""

Compute = Callable[[int], Any]
"""Computes a step of ``MEASURED_ROWS`` rows with so many threads; returns its numbers."""


class ShortStepChoice(NamedTuple):
    threads: int
    step_ms: dict[int, float]
    """Of a step, by threads."""

    def __str__(self) -> str:
        times = ", ".join(f"{ms:.2g} ms with {count}" for count, ms in self.step_ms.items())
        return f"short texts on {self.threads}: a step takes {times}"


class ShortStepTrial:
    """Measures steps with several numbers of threads. The least that any look has seen counts."""

    def __init__(
        self, compute: Compute, counts: list[int], clock: Clock = time.perf_counter
    ) -> None:
        """counts: ascending; those with which the numbers have other bits are left out."""
        wanted = compute(counts[0])
        self._counts = [one for one in counts if np.array_equal(compute(one), wanted)]
        self._compute, self._clock = compute, clock
        self._least: dict[int, float] = {}

    @property
    def choice(self) -> ShortStepChoice:
        least = dict(sorted(self._least.items()))
        ms = {count: 1000 * seconds for count, seconds in least.items()}
        return ShortStepChoice(preferred(least), ms)

    def start(self) -> ShortStepChoice:
        """The first look, at once."""
        for _ in self.again():
            pass
        return self.choice

    def again(self) -> Iterator[None]:
        """Another look, a step at a time: with the most threads first, and with fewer as long as
        that is not hopeless."""
        best = float("inf")
        for count in self._counts[::-1]:
            found = float("inf")
            for step in range(1 + STEPS):
                began = self._clock()
                self._compute(count)
                if step:
                    found = min(found, self._clock() - began)
                yield
            self._least[count] = min(found, self._least.get(count, found))
            if found > HOPELESS * best:
                return
            best = min(best, found)
