"""How long a tuning may take, and the line that says how far it is."""

from __future__ import annotations

import sys
import time

from penstock.loadtest.progress import CLEAR, note


class OutOfTime(Exception):
    """Too little time for what cannot be left out. The message says for what."""


class TimeLimit:
    """Counts down. What goes on is a line on a terminal that is written over; what was found stays,
    there and in a log."""

    def __init__(self, seconds: float, *, quiet: bool) -> None:
        self.seconds = seconds
        self._ends = time.monotonic() + seconds
        self._quiet = quiet
        self._terminal = sys.stderr.isatty() and not quiet

    @property
    def left(self) -> float:
        """Seconds; 0 once they are over."""
        return max(0.0, self._ends - time.monotonic())

    def now(self, text: str) -> None:
        """What is being done."""
        if self._terminal:
            note(f"{text} · {self.left:.0f} of {self.seconds:.0f} s left")

    def found(self, text: str) -> None:
        if not self._quiet:
            clear = CLEAR if self._terminal else ""
            print(f"{clear}{text}", file=sys.stderr, flush=True)

    def need(self, seconds: float, what: str) -> float:
        """The time left. Raises ``OutOfTime`` where that is less than what ``what`` needs."""
        if self.left < seconds:
            raise OutOfTime(
                f"--seconds {self.seconds:g} is too short for {what}, which takes about "
                f"{seconds:.0f} s more: give at least {self.seconds - self.left + 3 * seconds:.0f}"
            )
        return self.left
