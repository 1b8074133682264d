"""Sequences that wait for an adapter, and who of them is due first."""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator
from typing import NamedTuple

from penstock.services.scheduler.sequence import QueueKey, QueuePlace, Sequence

LEAST_WAITERS = 64

Turn = tuple[int, float, QueueKey]
"""(rank, lane key, key): of two waiting sequences the smaller one starts first."""


def turn_of(place: QueuePlace, lane_key: Callable[[str], float]) -> Turn:
    """When whoever stands here starts, compared with others. lane_key: the policy's."""
    return place.rank, lane_key(place.lane), place.key


class Waiter(NamedTuple):
    sequence: Sequence
    stood: QueuePlace
    """Where it stood in the queue."""
    place: QueuePlace
    """Where it is put off."""

    @property
    def is_put_off(self) -> bool:
        """Whether it has neither gone on nor ended meanwhile."""
        return self.sequence.queue_place is self.place

    @property
    def order(self) -> tuple[int, QueueKey]:
        """Among those who wait for the same adapter the smallest is first, in whichever lane."""
        return self.stood.rank, self.stood.key

    @property
    def waits(self) -> bool:
        """Whether it has yet to start, perhaps once more."""
        return self.sequence.queue_place is not None


class Waiters:
    """Those who wait until an adapter is in a place."""

    __slots__ = ("_most", "_waiters", "since")

    def __init__(self, since: float) -> None:
        """since: when the first of them began to."""
        self.since = since
        self._waiters: list[Waiter] = []
        self._most = LEAST_WAITERS
        """When there are so many, those that have gone leave the list."""

    def __len__(self) -> int:
        return len(self._waiters)

    def __iter__(self) -> Iterator[Waiter]:
        """Those that still wait, first the one that starts first."""
        return (one for one in self._waiters if one.is_put_off)

    def add(self, sequence: Sequence, stood: QueuePlace, place: QueuePlace) -> Waiter:
        if len(self._waiters) >= self._most:
            self._waiters = list(self)
            self._most = max(LEAST_WAITERS, 2 * len(self._waiters))
        waiter = Waiter(sequence, stood, place)
        insort(self._waiters, waiter, key=_order)
        return waiter

    def first(self) -> Waiter | None:
        """The one that starts first; ``None``: nobody waits any more."""
        gone = 0
        for one in self._waiters:
            if one.is_put_off:
                break
            gone += 1
        del self._waiters[:gone]
        return self._waiters[0] if self._waiters else None


def _order(waiter: Waiter) -> tuple[int, QueueKey]:
    return waiter.order
