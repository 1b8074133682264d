"""What the holder holds: for each model and device one set of weights, as open descriptors."""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple

from penstock.protocol.wire.descriptors import close_all
from penstock.protocol.wire.messages.held_weights import WeightsKey

ASLEEP = "its model sleeps, or is not served any more"
OUTLIVED_SECONDS = 60.0
MOST_EARLY_ENDS = 3
"""Weights that so many workers in a row have mapped and not outlived by ``OUTLIVED_SECONDS`` are
held no more: if it is their memory that is bad, the next worker makes new ones."""
CHECK_SECONDS = 0.5
"""Between two looks whether somebody who waits is still there."""


class HeldWeights(NamedTuple):
    manifest: bytes
    descriptors: list[int]
    num_bytes: int


class Lease:
    """Somebody is loading these weights, and nobody else need."""

    def __init__(self, key: WeightsKey) -> None:
        self.key = key


class HeldSets:
    """Sets of weights by key. May be used by several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._sets: dict[WeightsKey, HeldWeights] = {}
        self._leases: dict[WeightsKey, Lease] = {}
        self._early_ends: dict[WeightsKey, int] = {}
        self._released: frozenset[str] = frozenset()
        """Models of which nothing is held now."""
        self.served = 0
        """How often a worker was given weights."""

    @property
    def num_bytes(self) -> dict[str, int]:
        """By place."""
        found: dict[str, int] = {}
        with self._changed:
            for key, held in self._sets.items():
                found[key.place] = found.get(key.place, 0) + held.num_bytes
        return found

    def want(self, key: WeightsKey, seconds: float) -> HeldWeights | Lease | None:
        """The weights, with descriptors of the caller's own; or a lease: the caller loads them, and
        says so with ``end``. ``None``: after ``seconds`` somebody else is still loading them."""
        with self._changed:
            self._drop(one for one in self._sets if _replaces(key, one))
            if not self._changed.wait_for(
                lambda: key in self._sets or key not in self._leases, seconds
            ):
                return None
            held = self._sets.get(key)
            if held is None:
                lease = self._leases[key] = Lease(key)
                return lease
            self.served += 1
            return held._replace(descriptors=[os.dup(each) for each in held.descriptors])

    def offer(self, key: WeightsKey, held: HeldWeights) -> str:
        """Hold these; the descriptors are the holder's from now on. Returns why they are not held;
        empty: they are, or those that a worker offered before are."""
        with self._changed:
            refused = ASLEEP if key.model in self._released else ""
            if refused or key in self._sets:
                close_all(held.descriptors)
                return refused
            self._drop(one for one in self._sets if _replaces(key, one))
            self._sets[key] = held
            self._changed.notify_all()
            return ""

    def end(self, lease: Lease) -> None:
        """Who had it has offered the weights, or is gone."""
        with self._changed:
            if self._leases.get(lease.key) is lease:
                del self._leases[lease.key]
                self._changed.notify_all()

    def ended(self, key: WeightsKey, seconds: float) -> bool:
        """A worker has ended so long after it was given these. Returns whether they are held no
        more for that."""
        with self._changed:
            if key not in self._sets:
                return False
            if seconds > OUTLIVED_SECONDS:
                self._early_ends.pop(key, None)
                return False
            self._early_ends[key] = self._early_ends.get(key, 0) + 1
            if self._early_ends[key] < MOST_EARLY_ENDS:
                return False
            self._drop([key])
            return True

    def release(self, models: Collection[str]) -> Sequence[WeightsKey]:
        """Hold nothing of these models, until they are not named any more. Returns what was given
        back: the memory is free once no worker has it mapped."""
        with self._changed:
            self._released = frozenset(models)
            gone = [key for key in self._sets if key.model in self._released]
            self._drop(gone)
            return gone

    def close(self) -> None:
        with self._changed:
            self._drop(self._sets)

    def _drop(self, keys: Iterable[WeightsKey]) -> None:
        for key in list(keys):
            close_all(self._sets.pop(key).descriptors)
            self._early_ends.pop(key, None)


def _replaces(key: WeightsKey, other: WeightsKey) -> bool:
    return (key.model, key.place) == (other.model, other.place) and key.digest != other.digest
