"""The time of an event loop, which passes when a test says so."""

from __future__ import annotations

import asyncio

import pytest


class PassingTime:
    """That of the running loop: its timers fire as if so many seconds more had gone by."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        loop = asyncio.get_running_loop()
        self._real = loop.time
        self._passed_s = 0.0
        monkeypatch.setattr(loop, "time", lambda: self._real() + self._passed_s)

    async def passes(self, seconds: float) -> None:
        """Returns when the timers have fired that are due by then."""
        self._passed_s += seconds
        for _ in range(3):  # of the timer, and of what it has called
            await asyncio.sleep(0)
