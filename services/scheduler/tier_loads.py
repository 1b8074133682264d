"""KV blocks that come from the keeper, for sequences that wait for them.

A load is under way for each prefix, whoever wants it: the keeper is asked for the blocks, then the
worker copies them piece by piece between steps, and who waited finds them in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.services.scheduler.kv_cache import KVCache
from penstock.services.scheduler.kv_holder import KVHolder
from penstock.services.scheduler.kv_prefix import Prefix
from penstock.services.scheduler.sequence import QueuePlace, Sequence
from penstock.services.scheduler.waiting_queue import LOADING, WaitingQueue

MOST_LOADS = 64


class Waiter(NamedTuple):
    """A sequence that waits for a load."""

    sequence: Sequence
    place: QueuePlace
    run: int
    """Blocks that were known to be kept for it, from the first of the load on."""

    @property
    def is_put_off(self) -> bool:
        """Whether it has neither gone on nor ended meanwhile."""
        return self.sequence.queue_place is self.place


@dataclass(slots=True, eq=False)
class Load:
    """Blocks of one chain."""

    number: int
    names: list[bytes]
    began: float
    """Monotonic seconds."""
    ahead: int
    """Blocks of other loads that were to come when it began: all share one way, as they would share
    the device that computes them."""
    pinned: KVHolder | None
    """What lies before them in the prefix cache."""
    waiting: list[Waiter] = field(default_factory=list)
    expected: KVHolder | None = None
    slots: list[int] = field(default_factory=list)
    done: int = 0
    """Blocks that are copied."""
    asked: int = 0
    """Blocks whose copies are asked for."""
    asked_at: float = 0.0
    """When the last of them were, monotonic seconds."""
    stood_still: float = 0.0
    """Seconds in which copies waited for steps: they cost nothing, since these went on."""
    trusted: int = 0
    """Blocks before the first whose content may be wrong."""
    more: bool = False
    """The keeper is reading further ones."""
    no_room: bool = False
    """KV memory had none; who waits asks again when there is room."""
    until: float = 0.0
    """When the last one that waits goes on without them, monotonic seconds."""

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits."""
        return any(one.is_put_off for one in self.waiting)


class Loads:
    def __init__(self, kv: KVCache, waiting: WaitingQueue, numbers: Iterator[int]) -> None:
        self._kv, self._waiting, self._numbers = kv, waiting, numbers
        self._by_number: dict[int, Load] = {}
        self._by_first: dict[bytes, Load] = {}
        """By the first block that comes."""
        self._behind_stores: list[Waiter] = []
        """Those who wait until blocks are stored that they want to load."""

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
        load = Load(next(self._numbers), names, now, self.blocks_to_come, pinned, trusted=count)
        self._by_number[load.number] = self._by_first[names[0]] = load
        return load

    @property
    def blocks_to_come(self) -> int:
        """Of all loads that somebody waits for."""
        return sum(len(one.names) - one.done for one in self._by_number.values() if one.is_wanted)

    @property
    def owed(self) -> int:
        """Blocks that loads which somebody waits for have yet to take."""
        if not self._by_number:
            return 0
        loads = self._by_number.values()
        return sum(len(one.names) for one in loads if one.expected is None and one.is_wanted)

    def wait(self, load: Load, sequence: Sequence, run: int, until: float) -> None:
        """Let a waiting sequence wait for a load, and go on without it at the latest then. ``run``:
        blocks that are kept for it, which may be more than the load has."""
        load.until = max(load.until, until)
        load.waiting += self._put_off(sequence, run, until)

    def wait_for_store(self, sequence: Sequence, run: int, until: float) -> None:
        """Let a waiting sequence wait until what it wants to load has been stored."""
        self._behind_stores += self._put_off(sequence, run, until)

    def _put_off(self, sequence: Sequence, run: int, until: float) -> list[Waiter]:
        sequence.fetched = True
        self._waiting.remove(sequence)
        return [Waiter(sequence, self._waiting.put_off(sequence, until, LOADING), run)]

    def stored(self) -> None:
        """Those who waited for a store look again at what is kept."""
        waiters, self._behind_stores = self._behind_stores, []
        for one in waiters:
            self._go_on(one, again=True)

    def _go_on(self, one: Waiter, *, again: bool) -> None:
        """``again``: it may wait for another load."""
        if one.is_put_off:
            one.sequence.fetched = not again
            self._waiting.remove(one.sequence)
            self._waiting.push(one.sequence)

    def distrust(self, names: list[bytes]) -> None:
        """What is loaded under these names may be wrong."""
        if not self._by_number:
            return
        bad = set(names)
        for load in self._by_number.values():
            good = load.names[: load.trusted]
            load.trusted = next((at for at, name in enumerate(good) if name in bad), len(good))

    def take(self, load: Load, slots: list[int], more: bool) -> bool:
        """The keeper has the next blocks in these slots, and is reading ``more``. ``False``: there
        is none, or KV memory has no room."""
        load.slots += slots[: len(load.names) - len(load.slots)]
        load.more = more
        if load.expected is None and load.slots:
            names = load.names if more else load.names[: len(load.slots)]
            load.expected = self._kv.expect(names)
            load.no_room = load.expected is None
        return load.expected is not None

    def end(self, load: Load) -> None:
        """What is copied can be found, and those who wait go on: to another load where this one
        has brought a part of what is kept for them, or had no room."""
        ready = min(load.done, load.trusted)
        if (holder := load.expected) is not None:
            holder.expected = holder.expected[:ready]
            self._kv.ready(holder)
            self._kv.release(holder)
        if load.pinned is not None:
            self._kv.release(load.pinned)
        del self._by_number[load.number]
        del self._by_first[load.names[0]]
        for one in load.waiting:
            self._go_on(one, again=load.no_room or 0 < ready < one.run)

    def abandoned(self) -> list[Load]:
        """Those that nobody waits for any more. They must end: the blocks that they expect are
        missing to those who compute instead. The worker may still write into these blocks, but does
        so ahead of every plan that gives them to others."""
        if not self._by_number:
            return []
        return [one for one in self._by_number.values() if not one.is_wanted]

    def all(self) -> list[Load]:
        return list(self._by_number.values())
