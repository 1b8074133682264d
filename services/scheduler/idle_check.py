"""The core's counts are compared in pauses, where nobody waits for it."""

from __future__ import annotations

from penstock.services.scheduler.core import SchedulerCore

IDLE_SECONDS = 2.0
"""A pause of this length is used: the comparison takes 20 ms for 100,000 blocks."""


class IdleCheck:
    """Once in each pause behind some steps."""

    def __init__(self) -> None:
        self._idle_since: float | None = None
        """``None``: something is open, or nothing was planned since the last check."""
        self._checked_steps = 0

    def tick(self, core: SchedulerCore, now: float) -> None:
        """To be called a few times a second. Raises ``CoreFailed`` for what is wrong."""
        steps = core.counters.steps
        if not core.idle or steps == self._checked_steps:
            self._idle_since = None
        elif self._idle_since is None:
            self._idle_since = now
        elif now - self._idle_since >= IDLE_SECONDS:
            core.check()
            self._checked_steps = steps
