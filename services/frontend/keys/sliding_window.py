"""How much was used in the last minute, to a quarter of a second.

An amount is charged when a request is let in and corrected when it ends, in the slot of time in
which it was charged. So the sum over any minute stays within its limit. What a request takes beyond
what it was charged with, and what it is charged with beyond the whole limit, is owed where it is
not free: it wears off at the rate that the limit allows, so that it is paid for however long it
takes.
"""

from __future__ import annotations

import math

SLOT_S = 0.25
SLOTS = 240
WINDOW_S = SLOT_S * SLOTS


class SlidingWindow:
    """Amounts by the time at which they were charged. Times are those of one monotonic clock."""

    __slots__ = ("_amounts", "_owed", "_owed_at", "_total")

    def __init__(self) -> None:
        self._amounts: dict[int, int] = {}
        """By slot, the oldest first."""
        self._total = 0
        self._owed = 0.0
        self._owed_at = 0.0
        """From when on it wears off: what is owed is paid for after the minute that is full."""

    def used(self, now: float, limit: int) -> int:
        """Of the last minute, with what is owed."""
        self._forget(now)
        owed = self._owes(now, limit)
        return self._total + math.ceil(owed)

    def charge(self, now: float, amount: int) -> int:
        """Returns the slot, for ``correct``."""
        self._forget(now)
        slot = int(now / SLOT_S)
        self._amounts[slot] = self._amounts.get(slot, 0) + amount
        self._total += amount
        return slot

    def charge_owing(self, now: float, amount: int, limit: int) -> tuple[int, int]:
        """Charge what may be more than is free: the rest of it is owed. Returns the slot and what
        is owed of it, for ``correct``."""
        rest = max(0, amount - max(0, limit - self.used(now, limit)))
        if rest:
            owed = self._owes(now, limit)
            self._owed_at = max(now, self._owed_at) if owed else now + WINDOW_S
            self._owed = owed + rest
        return self.charge(now, amount - rest), rest

    def correct(self, now: float, slot: int, less: int, owed: int = 0, limit: int = 1) -> None:
        """Take back a part of what was charged, of what was owed of it first, if it counts
        still."""
        forgiven = min(less, owed, int(self._owes(now, limit)))
        self._owed -= forgiven
        if slot in self._amounts:
            back = min(less - forgiven, self._amounts[slot])
            self._amounts[slot] -= back
            self._total -= back

    def free_in(self, now: float, amount: int, limit: int) -> float:
        """Seconds until so much is free; 0: it is."""
        lacking = self.used(now, limit) + amount - limit
        if lacking <= 0:
            return 0.0
        wait = 0.0
        for slot, charged in self._amounts.items():
            lacking -= charged
            wait = self._until_over(slot, now)
            if lacking <= 0:
                return wait
        return max(wait, max(0.0, self._owed_at - now) + lacking * WINDOW_S / limit)

    def empty_in(self, now: float, limit: int) -> float:
        """Seconds until nothing of it counts any more."""
        self._forget(now)
        newest = next(reversed(self._amounts), None)
        after = 0.0 if newest is None or not self._total else self._until_over(newest, now)
        owed = self._owes(now, limit)
        paid = max(0.0, self._owed_at - now) + owed * WINDOW_S / limit if owed else 0.0
        return max(after, paid)

    def _until_over(self, slot: int, now: float) -> float:
        return max(0.0, (slot + 1 + SLOTS) * SLOT_S - now)

    def _owes(self, now: float, limit: int) -> float:
        if not self._owed:
            return 0.0
        return max(0.0, self._owed - max(0.0, now - self._owed_at) * limit / WINDOW_S)

    def _forget(self, now: float) -> None:
        first = int(now / SLOT_S) - SLOTS
        while self._amounts and (oldest := next(iter(self._amounts))) < first:
            self._total -= self._amounts.pop(oldest)
