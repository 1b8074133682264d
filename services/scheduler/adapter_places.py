"""Which adapters are in a place of the device, and which sequences wait for one that is not.

The scheduler alone decides it: it tells the workers what to bring in and what may leave for it, and
plans a sequence once all ranks have said that its adapter is there. Whoever waits is put off, so
that all others start past it.

Places are given in the order of the queue: next comes the adapter of the sequence that would start
first. The one that leaves for it has no running sequence and no row in an unanswered step, and
nobody who would start before that sequence waits for it; of several it is the least recently used
one. So whoever has waited longest, as the policy has it, is overtaken by nobody for ever.

While every place has running sequences, and one has been wanted for ``TURN_SECONDS``, an adapter is
closed: those who would start after that sequence wait, too, until those that run have ended. It is
the one with the fewest running sequences, since most is computed with the others meanwhile. Nobody
knows whose sequences end first: where none leaves, another one is closed after each pause, and each
pause is twice as long as the one before. Those are closed at once with which fewer sequences run
than wait for one of the others: more is computed when these take turns.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from weakref import ReferenceType

from penstock.protocol.wire.messages.steps import AdapterBrought, BringAdapter
from penstock.services.scheduler.adapter_waiters import Turn, Waiter, Waiters, turn_of
from penstock.services.scheduler.admission import Offers
from penstock.services.scheduler.crash_only import crash_only
from penstock.services.scheduler.endings import not_brought
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.open_sequences import OpenSequences
from penstock.services.scheduler.sequence import QueuePlace, Sequence
from penstock.services.scheduler.waiting_queue import ADAPTER

TURN_SECONDS = 1.0
"""So long newcomers of the adapters that are there overtake one that waits for a place, and so long
an adapter that has come is open to them."""
ASK_SECONDS = 5.0
"""Workers that have not said that an adapter is there are asked again."""


def _place_of(known: ReferenceType[Sequence]) -> QueuePlace | None:
    """Where a sequence waits, if it does and is not over."""
    sequence = known()
    return None if sequence is None else sequence.queue_place


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
    released: list[Waiter] = field(default_factory=list)
    """Those that waited for it, the last one first, until they start."""
    gone: list[ReferenceType[Sequence]] = field(default_factory=list)
    """Those that left their slot: some of them wait for another one. It keeps none of them."""

    def release(self, waiters: Iterable[Waiter]) -> None:
        """They may start."""
        both = {one.sequence: one for one in (*self.released, *waiters) if one.waits}
        self.released = sorted(both.values(), key=lambda waiter: waiter.order, reverse=True)

    def awaiting(self) -> Waiter | None:
        """The first of those that have yet to start."""
        while self.released and not self.released[-1].waits:
            self.released.pop()
        return self.released[-1] if self.released else None


@dataclass(slots=True)
class _Coming:
    number: int
    asked_at: float
    answers: dict[int, str] = field(default_factory=dict)
    """By the worker's incarnation: why it is not there; empty: it is."""


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
        self._wanted: dict[str, Waiters] = {}
        """In the order in which they were first asked for."""
        self._next: Waiter | None = None
        """The first of those whose adapter is in no place and is not coming, as last found."""
        self._closed: dict[str, None] = {}
        """Adapters that are there, and let nobody start that comes after the next one."""
        self._moved_at = -math.inf
        """When an adapter was last given a place."""
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
        self._closed.clear()
        self._next = None
        wanted, self._wanted = self._wanted, {}
        for one in wanted.values():
            self._go_on(one)
        return self

    @crash_only
    def offered(self, digests: Collection[str], now: float) -> None:
        """Adapters are loaded or gone: one that is new comes into a place while some are free."""
        if self._places is None:
            return
        self._next = None
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
        """Whether the sequence that is first in the queue may start; if not, it is put off until
        its adapter is there."""
        digest, stood = sequence.request.head.adapter, sequence.queue_place
        if not digest or self._places is None or stood is None:
            return True
        if digest in self._resident and (digest not in self._closed or self._is_due(stood)):
            return True
        waiting = self._sequences.waiting
        waiting.remove(sequence)
        place = waiting.put_off(sequence, math.inf, ADAPTER)
        is_new = digest not in self._wanted
        wanted = self._wanted.setdefault(digest, Waiters(now))
        waiter = wanted.add(sequence, stood, place)
        if self._next is not None and self._turn(waiter.stood) < self._turn(self._next.stood):
            self._next = None
        if is_new:
            self.look(now)
        return False

    def _turn(self, place: QueuePlace) -> Turn:
        return turn_of(place, self._sequences.policy.lane_key)

    def _is_due(self, place: QueuePlace) -> bool:
        """Whether who stands here starts before the next one that waits for a place."""
        return self._next is None or self._turn(place) < self._turn(self._next.stood)

    def started(self, sequence: Sequence) -> None:
        """A sequence has its slot."""
        if (held := self._used(sequence)) is not None:
            held.running += 1
            held.awaiting()

    def left(self, sequence: Sequence) -> None:
        """A sequence has its slot no more; unanswered steps may have a row of it."""
        if (held := self._used(sequence)) is not None:
            held.running -= 1
            held.last_step = self._in_flight.last
            held.gone = [one for one in held.gone if _place_of(one) is not None]
            held.gone.append(ReferenceType(sequence))

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
        while (waiter := self._find_next()) is not None and self._make_room(waiter):
            self._moved_at = now
            self._next = None
            self._ask(waiter.sequence.request.head.adapter, now)
        self._close(now)

    def _find_next(self) -> Waiter | None:
        """The first of those that wait for an adapter that is in no place and is not coming."""
        found = self._next
        if found is not None and found.is_put_off:
            return found
        found, turn = None, None
        for digest, wanted in list(self._wanted.items()):
            if (first := wanted.first()) is None:
                del self._wanted[digest]
            elif digest not in self._resident and digest not in self._coming:
                own = self._turn(first.stood)
                if turn is None or own < turn:
                    found, turn = first, own
        self._next = found
        return found

    def _close(self, now: float) -> None:
        """Let few further sequences start with adapters that are to leave, and let those of others
        that waited."""
        closed = self._closed = {one: None for one in self._closed if one in self._resident}
        overdue = now - self._waited_since() - TURN_SECONDS
        if self._next is None or overdue < 0.0:
            closed.clear()
        else:
            self._close_more(overdue, now)
        for digest in [one for one in self._wanted if one in self._resident]:
            wanted, held = self._wanted[digest], self._resident[digest]
            if digest not in closed:
                held.release(self._go_on(self._wanted.pop(digest)))
            elif (first := wanted.first()) is not None and self._is_due(first.stood):
                held.release(self._go_on(one for one in wanted if self._is_due(one.stood)))

    def _close_more(self, overdue: float, now: float) -> None:
        """overdue: seconds since an adapter should have had a place."""
        closed = self._closed
        pauses = min(overdue, now - self._moved_at) / TURN_SECONDS
        least = 1 + int(math.log2(1.0 + pauses))
        others = max(1, len(self._wanted) - len(closed))
        each = self._sequences.waiting.num_for_adapters / others
        ours = sorted(
            (held.running, held.since, digest)
            for digest, held in self._resident.items()
            if digest not in closed and now - held.since > TURN_SECONDS
        )
        for running, _, digest in ours:
            if len(closed) >= least and (running >= each or len(closed) >= others):
                return
            closed[digest] = None

    def _waited_since(self) -> float:
        """When the first of the adapters was asked for that are in no place and not coming; later
        than any time: there is none."""
        for digest, wanted in self._wanted.items():
            if digest not in self._resident and digest not in self._coming:
                return wanted.since
        return math.inf

    @property
    def _taken(self) -> int:
        return len(self._resident) + len(self._coming)

    def _make_room(self, waiter: Waiter) -> bool:
        """Whether there is a place for the adapter of one that waits, perhaps after another one has
        left."""
        if self._taken < (self._places or 0):
            return True
        steps = self._in_flight.steps
        answered = steps[0].number - 1 if steps else self._in_flight.last
        last, leaves = None, ""
        for digest, held in self._resident.items():
            if held.running or held.last_step > answered:
                continue
            turn = self._awaited(digest, held)
            if turn is None:
                leaves = digest
                break
            if turn > (last or self._turn(waiter.stood)):
                last, leaves = turn, digest
        if leaves:
            del self._resident[leaves]
            self.counters.evicted += 1
        return bool(leaves)

    def _awaited(self, digest: str, held: _Resident) -> Turn | None:
        """When the first sequence starts that is known to wait for an adapter that is there;
        ``None``: none is."""
        waiter, waiting = held.awaiting(), self._sequences.waiting
        known = [_place_of(one) for one in held.gone]
        if len(waiting) and (first := waiting.first()).request.head.adapter == digest:
            known.append(first.queue_place)
        places = [place for place in known if place is not None]
        if waiter is not None:
            places.append(waiter.stood)
        return min(map(self._turn, places), default=None)

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
            held.release(self._go_on(wanted))
            return
        self.counters.failed += 1
        for one in list(wanted or ()):
            self._sequences.end(one.sequence, not_brought(reason))

    def _go_on(self, wanted: Iterable[Waiter] | None) -> list[Waiter]:
        """Let those start that waited; returns them."""
        waiting = self._sequences.waiting
        found = list(wanted or ())
        for one in found:
            waiting.remove(one.sequence)
            waiting.push(one.sequence)
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
