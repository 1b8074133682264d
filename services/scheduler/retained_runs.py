"""Runs of retained blocks: what one request marks of a chain is prolonged, counted and ended whole.

A prompt of 131,072 tokens has 8,192 blocks. Each turn of its conversation prolongs the marks on all
of them: as one run that costs what one block does.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Run:
    """Blocks in a row of one chain that have the same mark."""

    names: list[bytes]
    """Of its blocks, in the chain's order. Some may have lost their marks since."""
    first: int
    """Where the first of them lies in the chain."""
    tenant: str | None
    """Whose requests asked for it; ``None``: those of several tenants did."""
    seconds: int
    until: float
    """Monotonic seconds."""
    setting: int
    """Number of the latest setting that marked or prolonged it."""
    live: int = 0
    """How many of its blocks still have this mark."""

    def common(self, names: list[bytes], at: int) -> int:
        """How many of its names are those of another chain from ``at`` on. The first is; a name
        stands for all that lies before it."""
        own = self.names
        alike, most = 1, min(len(own), len(names) - at)
        if own[most - 1] == names[at + most - 1]:
            return most
        while alike < most - 1:
            middle = (alike + most) // 2
            if own[middle - 1] == names[at + middle - 1]:
                alike = middle
            else:
                most = middle
        return alike


class RunQueue:
    """Runs in the order of their settings. Those of one setting lie in one chain; its end comes
    first."""

    def __init__(self) -> None:
        self._settings: OrderedDict[int, list[Run]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._settings)

    def __iter__(self) -> Iterator[Run]:
        return (run for runs in self._settings.values() for run in runs)

    def first(self) -> Run:
        return next(iter(self._settings.values()))[0]

    def add(self, run: Run) -> None:
        """Its setting is the latest one, or one of which another run is here."""
        insort(self._settings.setdefault(run.setting, []), run, key=lambda one: -one.first)

    def remove(self, run: Run) -> None:
        runs = self._settings[run.setting]
        runs.remove(run)
        if not runs:
            del self._settings[run.setting]
