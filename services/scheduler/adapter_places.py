"""Which adapters are in a place of the device, and which sequences wait for one that is not.

The scheduler alone decides it: it tells the workers what to bring in and what may leave for it, and
plans a sequence once all ranks have said that its adapter is there. Whoever waits is put off, so
that all others start past it. The adapter that leaves is the least recently used one of which no
sequence runs and no unanswered step has a row. Those that are wanted are brought in the order in
which they were first asked for. While every place has running sequences, and one has been wanted
for ``TURN_SECONDS``, the adapter that has its place for the longest, and for as long as that, is
closed: its newcomers wait, too, until those that run have ended and it has left. For each further
``TURN_SECONDS`` another one is closed, since nobody knows whose sequences end first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.protocol.wire.messages.steps import AdapterBrought, BringAdapter
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.crash_only import crash_only
from penstock.services.scheduler.endings import not_brought
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.open_sequences import OpenSequences
from penstock.services.scheduler.sequence import QueuePlace, Sequence
from penstock.services.scheduler.waiting_queue import ADAPTER

TURN_SECONDS = 1.0
"""So long newcomers of the adapters that are there overtake one that waits for a place, and so long
an adapter that has come is there for its own."""
ASK_SECONDS = 5.0
"""Workers that have not said that an adapter is there are asked again."""
LEAST_WAITERS = 64


@dataclass(slots=True)
class PlaceCounters:
    """Only ever grow."""

    brought: int = 0
    evicted: int = 0
    failed: int = 0


@dataclass(slots=True)
class _Resident:
    """An adapter in a place."""

    since: float = -math.inf
    running: int = 0
    """Sequences that run with it."""
    last_step: int = 0
    """The newest step that may have a row of it, once none runs."""
    released: list[Sequence] = field(default_factory=list)
    """Those that waited for it, until the first of them starts."""


@dataclass(slots=True)
class _Coming:
    number: int
    asked_at: float
    answers: dict[int, str] = field(default_factory=dict)
    """By the worker's incarnation: why it is not there; empty: it is."""


class _Waiter(NamedTuple):
    sequence: Sequence
    place: QueuePlace

    @property
    def waits(self) -> bool:
        """Whether it has neither gone on nor ended meanwhile."""
        return self.sequence.queue_place is self.place


@dataclass(slots=True)
class _Wanted:
    since: float
    waiting: list[_Waiter] = field(default_factory=list)
    most: int = LEAST_WAITERS
    """When so many are in the list, those that have gone leave it."""

    def add(self, waiter: _Waiter) -> None:
        if len(self.waiting) >= self.most:
            self.waiting = [one for one in self.waiting if one.waits]
            self.most = max(LEAST_WAITERS, 2 * len(self.waiting))
        self.waiting.append(waiter)


class AdapterPlaces:
    """Of one engine; ``begin`` is called for each epoch."""

    def __init__(self, sequences: OpenSequences, in_flight: StepsInFlight, ranks: int) -> None:
        """ranks: workers that each bring an adapter in."""
        self._sequences, self._in_flight, self._ranks = sequences, in_flight, ranks
        self.counters = PlaceCounters()
        self.to_workers: list[BringAdapter] = []
        """To be sent; a plan that was made before may go ahead of it or behind it."""
        self._places: int | None = None
        """``None``: nobody has said how many there are, and every adapter is there."""
        self._resident: dict[str, _Resident] = {}
        """By digest, the least recently used first."""
        self._coming: dict[str, _Coming] = {}
        self._wanted: dict[str, _Wanted] = {}
        """In the order in which they were first asked for."""
        self._closed: Collection[str] = ()
        """Adapters that are there, and let nobody start any more."""
        self._numbers = itertools.count(1)

    @property
    def num_resident(self) -> int:
        return len(self._resident)

    def begin(self, offers: Offers) -> AdapterPlaces:
        """A worker begins an epoch, and nothing runs. Who waited looks again."""
        self._places = offers.places
        self._resident = {digest: _Resident() for digest in offers.resident}
        self._coming.clear()
        self.to_workers.clear()
        self._closed = ()
        wanted, self._wanted = self._wanted, {}
        for one in wanted.values():
            self._go_on(one)
        return self

    @crash_only
    def offered(self, digests: Collection[str], now: float) -> None:
        """Adapters are loaded or gone: one that is new comes into a place while some are free."""
        if self._places is None:
            return
        for digest in [one for one in self._resident if one not in digests]:
            del self._resident[digest]
        for digest in [one for one in self._coming if one not in digests]:
            del self._coming[digest]
        for digest in sorted(digests):
            if self._taken >= self._places:
                return
            if digest not in self._resident and digest not in self._coming:
                self._ask(digest, now)

    # Sequences.

    def admits(self, sequence: Sequence, now: float) -> bool:
        """Whether a waiting sequence may start; if not, it is put off until its adapter is."""
        digest = sequence.request.head.adapter
        if not digest or self._places is None:
            return True
        if digest in self._resident and digest not in self._closed:
            return True
        wanted = self._wanted.get(digest)
        if is_new := wanted is None:
            wanted = self._wanted[digest] = _Wanted(now)
        waiting = self._sequences.waiting
        waiting.remove(sequence)
        place = waiting.put_off(sequence, math.inf, ADAPTER)
        wanted.add(_Waiter(sequence, place))
        if is_new:
            self.look(now)
        return False

    def started(self, sequence: Sequence) -> None:
        """A sequence has its slot."""
        if (held := self._used(sequence)) is not None:
            held.running += 1
            held.released.clear()

    def left(self, sequence: Sequence) -> None:
        """A sequence has its slot no more; unanswered steps may have a row of it."""
        if (held := self._used(sequence)) is not None:
            held.running -= 1
            held.last_step = self._in_flight.last

    def _used(self, sequence: Sequence) -> _Resident | None:
        """The sequence's adapter, which is now the most recently used one."""
        digest = sequence.request.head.adapter
        held = self._resident.pop(digest, None) if digest else None
        if held is not None:
            self._resident[digest] = held
        return held

    # Places.

    def look(self, now: float) -> None:
        """Bring in what is wanted, as far as there is room. To be called ahead of each plan."""
        if not self._wanted and not self._coming:
            return
        for digest, coming in self._coming.items():
            if now - coming.asked_at > ASK_SECONDS:
                coming.asked_at = now
                self._tell(digest, coming)
        overdue, full = 0, False
        for digest, wanted in list(self._wanted.items()):
            if not any(one.waits for one in wanted.waiting):
                del self._wanted[digest]
            elif digest in self._resident or digest in self._coming:
                continue
            elif not full and self._make_room(now):
                self._ask(digest, now)
            else:
                full = True
                overdue += int((now - wanted.since) / TURN_SECONDS)
        self._close(overdue, now)

    def _close(self, count: int, now: float) -> None:
        """Let no further sequences start with so many adapters, and let those of others."""
        ours = [(held.since, digest) for digest, held in self._resident.items()]
        due = sorted(one for one in ours if now - one[0] > TURN_SECONDS) if count else []
        self._closed = {digest for _, digest in due[:count]}
        for digest in [one for one in self._wanted if one in self._resident]:
            if digest not in self._closed:
                self._go_on(self._wanted.pop(digest))

    @property
    def _taken(self) -> int:
        return len(self._resident) + len(self._coming)

    def _make_room(self, now: float) -> bool:
        """Whether there is a place, perhaps one that the least recently used adapter leaves."""
        if self._taken < (self._places or 0):
            return True
        steps = self._in_flight.steps
        answered = steps[0].number - 1 if steps else self._in_flight.last
        for digest, held in self._resident.items():
            if not held.running and held.last_step <= answered and not _is_awaited(held, now):
                del self._resident[digest]
                self.counters.evicted += 1
                return True
        return False

    def _ask(self, digest: str, now: float) -> None:
        coming = self._coming[digest] = _Coming(next(self._numbers), now)
        self._tell(digest, coming)

    def _tell(self, digest: str, coming: _Coming) -> None:
        keeps = [*self._resident, *self._coming]
        self.to_workers.append(BringAdapter(coming.number, digest, keeps))

    @crash_only
    def answered(self, sender: int, message: AdapterBrought, now: float) -> None:
        """A worker has brought one in, or could not."""
        digest, coming = message.digest, self._coming.get(message.digest)
        if coming is None or coming.number != message.number:
            return
        coming.answers[sender] = message.reason
        if len(coming.answers) < self._ranks:
            return
        del self._coming[digest]
        wanted = self._wanted.pop(digest, None)
        reason = next(filter(None, coming.answers.values()), "")
        if not reason:
            self.counters.brought += 1
            held = self._resident[digest] = _Resident(now)
            held.released += self._go_on(wanted)
            return
        self.counters.failed += 1
        for one in wanted.waiting if wanted is not None else ():
            if one.waits:
                self._sequences.end(one.sequence, not_brought(reason))

    def _go_on(self, wanted: _Wanted | None) -> Iterable[Sequence]:
        """Let those start that waited; returns them."""
        waiting = self._sequences.waiting
        found = [one.sequence for one in wanted.waiting if one.waits] if wanted is not None else []
        for sequence in found:
            waiting.remove(sequence)
            waiting.push(sequence)
        return found

    def check(self, running: Collection[Sequence]) -> None:
        """Raises ``RuntimeError`` where counts are wrong, or a sequence runs without its
        adapter."""
        if self._places is None:
            return
        counts = dict.fromkeys(self._resident, 0)
        for sequence in running:
            if digest := sequence.request.head.adapter:
                if digest not in counts:
                    raise RuntimeError("a sequence runs whose adapter is in no place")
                counts[digest] += 1
        if counts != {digest: held.running for digest, held in self._resident.items()}:
            raise RuntimeError("running sequences and counts of their adapters differ")
        if self._taken > self._places:
            raise RuntimeError(f"{self._taken} adapters in {self._places} places")


def _is_awaited(held: _Resident, now: float) -> bool:
    """Whether those for whom an adapter has just come have yet to start."""
    if now - held.since > TURN_SECONDS:
        held.released.clear()
    return any(one.queue_place is not None for one in held.released)
