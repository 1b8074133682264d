"""The time of an event loop, which passes when a test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest


class PassingTime:
    """That of the running loop: its timers fire as if so many seconds more had gone by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, stands: bool = False) -> None:
        """stands: no time goes by on its own, however slow the machine is."""
        loop = asyncio.get_running_loop()
        real, begun = loop.time, loop.time()
        self._passed_s = 0.0
        self.now: Callable[[], float] = lambda: (begun if stands else real()) + self._passed_s
        monkeypatch.setattr(loop, "time", self.now)

    async def passes(self, seconds: float) -> None:
        """Returns when the timers have fired that are due by then."""
        self._passed_s += seconds
        for _ in range(3):  # of the timer, and of what it has called
            await asyncio.sleep(0)
