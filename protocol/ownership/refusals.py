"""How often, and for how long, a request looks for an engine that has room."""

from __future__ import annotations

FIRST_PAUSE_SECONDS = 0.25
LONGEST_PAUSE_SECONDS = 4.0
NEW_SECONDS = 2.0
"""A request that no engine has taken yet: its client should hear of an overload soon."""
STARTED_SECONDS = 60.0
"""A request whose answer has begun: an engine that starts again may still finish it."""


class Refusals:
    """The refusals of one request since an engine last took it."""

    __slots__ = ("count", "since")

    def __init__(self) -> None:
        self.count = 0
        self.since = 0.0
        """When the first of them came."""

    def next_try(self, now: float, *, started: bool) -> float | None:
        """Count a refusal; when to ask again, or ``None`` when the time for it is over.

        Each pause is twice as long as the one before, up to ``LONGEST_PAUSE_SECONDS``.
        """
        if not self.count:
            self.since = now
        pause = min(FIRST_PAUSE_SECONDS * 2.0 ** min(self.count, 16), LONGEST_PAUSE_SECONDS)
        self.count += 1
        limit = STARTED_SECONDS if started else NEW_SECONDS
        return now + pause if now + pause - self.since <= limit else None

    def clear(self) -> None:
        """An engine took the request."""
        self.count = 0
