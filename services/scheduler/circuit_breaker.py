"""Keeps from asking for a while what fails each time (circuit breaker)."""

from __future__ import annotations

MOST_FAILURES = 8
"""So many without a success between them, and nothing is asked."""
LATE = 4
"""A failure that was waited for until it was too late counts as so many that came at once."""
PAUSE_SECONDS = 30.0
"""Nothing is asked for so long. The first failure behind that begins the next pause."""


class CircuitBreaker:
    """Of one thing that is asked. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._failures = 0
        self._paused_until = 0.0

    def allows(self, now: float) -> bool:
        """Whether to ask."""
        return now >= self._paused_until

    def succeeded(self) -> None:
        self._failures = 0

    def failed(self, now: float, *, late: bool = False) -> None:
        """It was asked in vain."""
        self._failures = min(MOST_FAILURES, self._failures + (LATE if late else 1))
        if self._failures == MOST_FAILURES:
            self._paused_until = now + PAUSE_SECONDS

    def reset(self) -> None:
        """Something else is asked from now on."""
        self._failures, self._paused_until = 0, 0.0
