"""When steps on a device that others compute on, too, rest in between."""

from __future__ import annotations

import time
from collections.abc import Callable

BUSY = 1.4
"""A step that takes so many times the least time of such steps shares the device just now."""
REST = 1.6
"""Times of the step that it follows. Beside steps that rest as long as they took, a token took 1.6
times as long as without them."""


class Throttle:
    """Lets others go first who compute on the same device.

    The driver gives the processes of a device their turns, so a stream of tokens is slower while a
    step runs. An engine that rests after each step for ``REST`` times its length leaves others most
    of the time whole.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._now, self._sleep = now, sleep
        self._least: dict[int, float] = {}
        """Seconds a row, by the bits of the number of rows."""

    def after(self, rows: int, begun: float) -> None:
        """A step of so many rows has ended, which had begun then: rest if others compute, too."""
        took = self._now() - begun
        alike, a_row = rows.bit_length(), took / rows
        least = min(a_row, self._least.get(alike, a_row))
        self._least[alike] = least
        if a_row > BUSY * least:
            self._sleep(REST * took)
