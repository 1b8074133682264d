"""Which models sleep, as their launchers say."""

from __future__ import annotations

from collections.abc import Collection

from penstock.protocol.wire.messages.membership import Sleeper
from penstock.services.router.member import Member

ORPHAN_SECONDS = 10.0
"""A launcher that was declared lost joins anew within so long, unless it is gone."""


class SleepingModels(dict[str, Sleeper]):
    """By name. They sleep on while their launcher joins anew; one that is gone wakes nobody."""

    def __init__(self) -> None:
        super().__init__()
        self._orphaned_at: float | None = None
        """Since when no member says that they sleep."""

    def look(self, members: Collection[Member]) -> None:
        """A launcher has said something new."""
        self.clear()
        self.update((one.model, one) for member in members for one in member.sleepers)

    def tick(self, members: Collection[Member], now: float) -> bool:
        """Returns whether something has changed."""
        if not self or any(member.sleepers for member in members):
            self._orphaned_at = None
        elif self._orphaned_at is None:
            self._orphaned_at = now
        elif now - self._orphaned_at > ORPHAN_SECONDS:
            self.clear()
            return True
        return False
