"""Waiting for something that no event tells of: the test looks again and again, and fails in the
end."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

PATIENCE = 60.0
"""Seconds for anything that is to come, on a busy machine."""
T = TypeVar("T")
Told = str | Callable[[], object]
"""What the error says; a function is only called for it."""


def until(found: Callable[[], T], seconds: float = PATIENCE, told: Told = "") -> T:
    """The first true value of ``found``. Raises ``AssertionError``: there is none in time."""
    for pause_s in _pauses(seconds):
        if one := found():
            return one
        time.sleep(pause_s)
    raise AssertionError(_in_vain(seconds, told))


async def async_until(found: Callable[[], T], seconds: float = PATIENCE, told: Told = "") -> T:
    """``until``, beside the other tasks of an event loop."""
    for pause_s in _pauses(seconds):
        if one := found():
            return one
        await asyncio.sleep(pause_s)
    raise AssertionError(_in_vain(seconds, told))


def _pauses(seconds: float) -> Iterator[float]:
    """Seconds to rest after each look, at first short ones. One look is when the time is over."""
    deadline, pause_s = time.monotonic() + seconds, 0.001
    while time.monotonic() < deadline:
        yield pause_s
        pause_s = min(1.5 * pause_s, 0.03)
    yield 0.0


def _in_vain(seconds: float, told: Told) -> str:
    said = told if isinstance(told, str) else told()
    return f"it did not come true within {seconds:g} s" + (f": {said}" if said else "")
