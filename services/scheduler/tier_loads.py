"""KV blocks that come from the keeper, for sequences that wait for them.

A load is under way for each prefix, whoever wants it: the keeper is asked for the blocks, then the
worker copies them piece by piece between steps, and who waited finds them in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.services.scheduler.kv_cache import KVCache, Prefix
from penstock.services.scheduler.kv_holder import KVHolder
from penstock.services.scheduler.sequence import QueuePlace, Sequence
from penstock.services.scheduler.waiting_queue import LOADING, WaitingQueue

MOST_LOADS = 64


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of one chain."""

    number: int
    names: list[bytes]
    began: float
    """Monotonic seconds."""
    pinned: KVHolder | None
    """What lies before them in the prefix cache."""
    waiting: list[tuple[Sequence, QueuePlace]] = field(default_factory=list)
    expected: KVHolder | None = None
    slots: list[int] = field(default_factory=list)
    done: int = 0
    """Blocks that are copied."""
    asked: int = 0
    """Blocks whose copies are asked for."""
    until: float = 0.0
    """When the last one that waits goes on without them, monotonic seconds."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return any(one.queue_place is place for one, place in self.waiting)


class Loads:
    def __init__(self, kv: KVCache, waiting: WaitingQueue, numbers: Iterator[int]) -> None:
        self._kv, self._waiting, self._numbers = kv, waiting, numbers
        self._by_number: dict[int, Load] = {}
        self._by_first: dict[bytes, Load] = {}
        """By the first block that comes."""

    def __len__(self) -> int:
        return len(self._by_number)

    @property
    def full(self) -> bool:
        return len(self._by_number) >= MOST_LOADS

    def find(self, number: int) -> Load | None:
        return self._by_number.get(number)

    def of(self, first: bytes) -> Load | None:
        """The load under way that begins with this block."""
        return self._by_first.get(first)

    def begin(self, digests: list[bytes], hits: Prefix, count: int, now: float) -> Load:
        """Load ``count`` blocks behind those that are found."""
        names = digests[hits.length : hits.length + count]
        pinned = self._kv.pin(digests[: hits.length]) if hits.length else None
        load = Load(next(self._numbers), names, now, pinned)
        self._by_number[load.number] = self._by_first[names[0]] = load
        return load

    def wait(self, load: Load, sequence: Sequence, until: float) -> None:
        """Let a waiting sequence wait for a load, and go on without it at the latest then."""
        load.until = max(load.until, until)
        sequence.fetched = True
        self._waiting.remove(sequence)
        self._waiting.put_off(sequence, until, LOADING)
        if (place := sequence.queue_place) is not None:
            load.waiting.append((sequence, place))

    def take(self, load: Load, slots: list[int]) -> bool:
        """The keeper has the blocks in these slots. ``False``: KV memory has no room."""
        load.slots = slots
        load.expected = self._kv.expect(load.names[: len(slots)]) if slots else None
        return load.expected is not None

    def end(self, load: Load) -> None:
        """What is copied can be found, and those who wait go on."""
        if (holder := load.expected) is not None:
            holder.expected = holder.expected[: load.done]
            self._kv.ready(holder)
            self._kv.release(holder)
        if load.pinned is not None:
            self._kv.release(load.pinned)
        del self._by_number[load.number]
        del self._by_first[load.names[0]]
        for sequence, place in load.waiting:
            if sequence.queue_place is place:
                self._waiting.remove(sequence)
                self._waiting.push(sequence)

    def abandoned(self) -> list[Load]:
        """Those that nobody waits for any more. They must end: the blocks that they expect are
        missing to those who compute instead. The worker may still write into these blocks, but does
        so ahead of every plan that gives them to others."""
        if not self._by_number:
            return []
        return [one for one in self._by_number.values() if not one.is_wanted]

    def all(self) -> list[Load]:
        return list(self._by_number.values())
