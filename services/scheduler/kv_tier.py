"""An engine's side of the keeper: what is stored there, and what comes from there.

The scheduler knows the keys of all that the keeper has, so a prompt of which nothing is kept costs
a look into a set and no message. Like the core it has no socket: what it has to say lies in
``to_keeper`` and ``to_worker`` until somebody sends it, copies always ahead of the next plan.
"""

from __future__ import annotations

import itertools

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    STORES_AT_A_TIME,
    URGENT_STORES,
    KVCopied,
    KVCopies,
    KVForget,
    TierDrop,
    TierGet,
    TierGot,
    TierKeys,
    TierLent,
    TierOpen,
    TierOpened,
    TierRelease,
    TierStored,
    joined,
    split,
)
from penstock.services.scheduler.circuit_breaker import CircuitBreaker
from penstock.services.scheduler.crash_only import crash_only
from penstock.services.scheduler.in_flight import StepsInFlight
from penstock.services.scheduler.kv_prefix import NOTHING, Prefix
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.planner import Planner
from penstock.services.scheduler.prefill_budget import PrefillBudget
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.tier_counters import TierCounters
from penstock.services.scheduler.tier_loads import Load, Loads
from penstock.services.scheduler.tier_rates import TierRates
from penstock.services.scheduler.tier_stores import KeptBlocks, StoreQueue, StoresUnderWay, Storing
from penstock.services.scheduler.waiting_queue import WaitingQueue

PIECE_BYTES = 2 * 1024 * 1024
"""Copied between two steps at most (one block where it is larger), of what is not urgent:
9 ms, where 16 MiB were measured to take 70."""
URGENT_PIECES = 4
"""At most so many are copied ahead of one step that overwrites them; the rest is missed. Where
copies run beside steps, it is ``URGENT_STORES``, also of several steps together."""
AHEAD = 0
"""As ``store_after``: what is computed is stored at once, since other engines wait for it; whole
steps at a time, unless copies run beside the steps."""


class KVTier:
    """Of one engine; ``begin`` is called for each epoch."""

    _stores: StoreQueue
    _loads: Loads

    def __init__(
        self,
        blocks: KeptBlocks,
        store_after: int,
        reply_to: str,
        waiting: WaitingQueue,
        in_flight: StepsInFlight,
        prefill: PrefillBudget,
    ) -> None:
        """``store_after``: prompts that a block must have been part of, or ``AHEAD``."""
        self._waiting, self._in_flight = waiting, in_flight
        self.rates = TierRates(prefill)
        self.counters = TierCounters()
        self.to_keeper: list[Message] = []
        self.to_worker: list[KVCopies | KVForget] = []
        self.is_open = False
        """A keeper keeps blocks of this engine."""
        self.refused = ""
        """Why it does not."""
        self.space, self.slot_bytes, self.piece_bytes = self.blocks = blocks
        self._store_after, self._reply_to = store_after, reply_to
        self._pool = ""
        self._known: set[bytes] = set()
        self._stock: list[int] = []
        """Empty slots that the keeper has lent."""
        self._storing = StoresUnderWay()
        self._untold: set[bytes] = set()
        """What is stored, while the keeper has not told everybody; only with ``AHEAD``."""
        self._numbers = itertools.count(1)
        self._epoch = self._lent = self._piece = self._store_piece = self._at_a_time = 0
        self._breaker = CircuitBreaker()
        """Of loads."""

    def begin(self, epoch: int, limits: Limits, planner: Planner) -> None:
        """A worker begins with empty KV memory, which this planner owns."""
        kv, planner.tier = planner.kv, self
        self._epoch, self._kv = epoch, kv
        self.rates.slot_bytes, self.rates.block_size = self.slot_bytes, kv.block_size
        self._piece = max(1, (self.piece_bytes or PIECE_BYTES) // max(1, self.slot_bytes))
        in_step = limits.blocks_for(limits.max_num_batched_tokens)
        whole_steps = not self._store_after and not self.piece_bytes
        self._store_piece = max(self._piece, in_step) if whole_steps else self._piece
        self._lent = 2 * in_step + self._piece
        self._stores = StoreQueue(kv.blocks, self._in_flight, self._store_after)
        self._stores.known = self._known
        self._stores.room = len(self._stock)
        self._at_a_time = STORES_AT_A_TIME if self.piece_bytes else 1
        most = URGENT_STORES if self.piece_bytes else URGENT_PIECES
        self._stores.most_urgent = most * self._piece
        self._stores.sharing = self._storing if self.piece_bytes else None
        if self.is_open:
            self._stores.follow()
        self._loads = Loads(kv, self._waiting, self._numbers)

    # --- the keeper

    def opening(self) -> TierOpen:
        """What a keeper is told first."""
        return TierOpen(self.space, self.slot_bytes, self._lent, self._reply_to)

    @crash_only
    def lost_keeper(self) -> None:
        """Nothing is kept until there is another one."""
        self.is_open, self._pool, self.refused = False, "", ""
        self._known.clear()
        self._untold.clear()
        self._stock.clear()
        self._storing.clear()
        self._stores.stop()
        self._end_loads()
        self._breaker.reset()
        self.to_keeper.clear()

    def change_space(self, blocks: KeptBlocks) -> None:
        """The next worker's blocks are others: nothing is kept until a keeper is open for them."""
        self.lost_keeper()
        self.space, self.slot_bytes, self.piece_bytes = self.blocks = blocks
        self.rates.forget()

    def lost_worker(self) -> None:
        """What it was copying is worth nothing."""
        self.to_worker.clear()
        self._stores.clear()
        self._give_up(list(self._storing))
        self._end_loads()

    def _give_up(self, numbers: list[int]) -> None:
        """Copies that will not be answered."""
        for number in numbers:
            lost = self._storing.pop(number)
            self._known.difference_update(lost.slots)
            unused = list(lost.slots.values())
            self.to_keeper.append(TierStored(b"", [], unused, self._reply_to))
        if numbers:
            self._loads.stored()

    def _end_loads(self) -> None:
        for load in self._loads.all():
            load.done = 0
            self._end(load, failed=True)
        self._loads.stored()

    @crash_only
    def take(self, message: Message, now: float) -> None:
        """An answer of the keeper or the worker."""
        match message:
            case TierOpened() if message.space in (self.space, b""):
                self._opened(message)
            case TierKeys() if message.space == self.space:
                self._known.update(split(message.added))
                self._known.difference_update(split(message.gone))
                if self._untold:
                    self._untold.difference_update(split(message.added))
            case TierLent() if self.is_open:
                self._stock += message.slots
                self._stores.room = len(self._stock)
                self.after_step()
            case TierGot():
                self._got(message, now)
            case KVCopied() if message.epoch == self._epoch:
                if message.number in self._storing:
                    self._stored(message, now)
                elif (load := self._loads.find(message.number)) is not None:
                    self._copied(load, message, now)

    def _opened(self, message: TierOpened) -> None:
        if message.refused:
            self.refused = message.refused
            return
        if not message.pool:  # it took this scheduler for gone
            self.lost_keeper()
            return
        self.is_open, self._pool = True, message.pool
        self._stock = list(message.slots)
        self._stores.room = len(self._stock)
        self._stores.follow()

    # --- stores

    def after_step(self) -> None:
        """Copy the next of what is wanted there, unless as much is under way as may be."""
        while len(self._stores) and self._stock and self._storing.in_time < self._at_a_time:
            if not (found := self._stores.take(min(self._store_piece, len(self._stock)))):
                return
            self._store(found)

    def before_plan(self) -> None:
        """Blocks were taken, by a plan or for a load: what they overwrite is copied first."""
        if self._stores.urgent and (urgent := self._stores.take_urgent()):
            self._store(urgent, urgent=True)

    def _store(self, found: list[tuple[bytes, int]], *, urgent: bool = False) -> None:
        names = [name for name, _ in found]
        slots = [self._stock.pop() for _ in found]
        self._stores.room = len(self._stock)
        self._known.update(names)
        number = next(self._numbers)
        self._storing[number] = Storing(dict(zip(names, slots, strict=True)), len(names), urgent)
        blocks = [block for _, block in found]
        self._copy(number, names, blocks, slots, store=True)

    def _copy(
        self, number: int, names: list[bytes], blocks: list[int], slots: list[int], *, store: bool
    ) -> None:
        self.to_worker.append(
            KVCopies(
                *(self._epoch, self._in_flight.last, number, self._pool, store),
                *(blocks, slots, joined(names)),
            )
        )

    def _stored(self, message: KVCopied, now: float) -> None:
        storing = self._storing.pop(message.number)
        done, names = message.done, list(storing.slots)
        self._known.difference_update(names[done:])
        good = [name for name in names[:done] if name not in storing.bad]
        slots = [storing.slots.pop(name) for name in good]
        unused = list(storing.slots.values())
        self.counters.stored += len(good)
        self._stores.missed += len(names) - done
        self.to_keeper.append(TierStored(joined(good), slots, unused, self._reply_to))
        self._loads.stored()
        if not self._store_after:
            self._untold.update(good)
        if done:
            self.rates.stored(done, message.seconds, now)
        self.after_step()

    def is_due(self, name: bytes) -> bool:
        """Whether a block is about to be at hand for other engines."""
        return name in self._untold or name in self._stores or self._storing.has(name)

    def is_at_hand(self, name: bytes) -> bool:
        """Whether the keeper has a block, and every engine knows."""
        return name in self._known and not self.is_due(name)

    def keeps(self, names: list[bytes]) -> bool:
        """Whether the keeper has all of these blocks, or is about to."""
        return self._known.issuperset(names)

    @property
    def block_size(self) -> int:
        return self._kv.block_size

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has lost its blocks and will come back: they are kept if it is quicker to
        load than to compute them again."""
        sequence.fetched = False
        names = sequence.kv.digests
        rates = self.rates
        if self.is_open and rates.pays(len(names), rates.store + rates.load):
            self._stores.want(names)

    def distrust(self, names: list[bytes]) -> None:
        """What was computed under these names may be wrong."""
        self._stores.forget(names)
        self._loads.distrust(names)
        self._storing.distrust(names)
        if self.is_open and (kept := [name for name in names if name in self._known]):
            self._known.difference_update(kept)
            self.to_keeper.append(TierDrop(joined(kept), False, self._reply_to))

    # --- loads

    def want(self, names: list[bytes]) -> None:
        """Sequences have these blocks in common, or one wants them retained."""
        if self.is_open:
            self._stores.want(names)

    def fetches(self, sequence: Sequence, hits: Prefix, now: float) -> bool:
        """Whether a sequence that could start now waits for blocks to be loaded instead. It is
        then put off, and again only where it has found a part or there was no room."""
        if not self.is_open or sequence.fetched or sequence.suspect or hits is NOTHING:
            return False
        if not self._breaker.allows(now):
            return False
        first, digests, known = hits.length, sequence.kv.digests, self._known
        most = (len(sequence.tokens) - 1) // self._kv.block_size
        self.counters.queried += max(0, most - first)
        sequence.fetched = True
        count = 0
        while first + count < most and digests[first + count] in known:
            count += 1
        if not count:
            return False
        if not sequence.request.head.hand_overs and not self.rates.load_pays(count):
            self.counters.slow += 1
            return False
        load, ahead = self._loads.of(digests[first]), self._loads.blocks_to_come
        if self._storing.has(digests[first]):
            until = now + self.rates.longest_wait(count + ahead)
            self._loads.wait_for_store(sequence, count, until)
            return True
        began, ahead = (now, ahead) if load is None else (load.began, load.ahead)
        until = began + self.rates.longest_wait(count + ahead)
        if until <= now or (load is None and self._loads.full):
            return False
        if load is None:
            load = self._loads.begin(digests, hits, count, now)
            self.to_keeper.append(TierGet(load.number, joined(load.names), self._reply_to))
        self._loads.wait(load, sequence, count, until)
        return True

    @property
    def owed(self) -> int:
        """Blocks of KV memory that loads are about to take."""
        return self._loads.owed

    def _got(self, message: TierGot, now: float) -> None:
        load = self._loads.find(message.number)
        if load is None:
            self.to_keeper.append(TierRelease(message.number, self._reply_to))
            return
        if load.is_wanted and self._loads.take(load, message.slots, message.more):
            self.before_plan()
            if load.asked == load.done:
                self._go_on(load, now)
            return
        if not message.slots:
            self._breaker.failed(now)
        self._end(load, failed=load.is_wanted)

    def _go_on(self, load: Load, now: float) -> None:
        """All that was asked for is copied: the next piece, or the end."""
        if load.is_wanted and load.done < len(load.slots):
            self._copy_piece(load, now)
        elif not load.more or not load.is_wanted:
            self._whole(load, now)

    def _copy_piece(self, load: Load, now: float) -> None:
        if load.expected is None:
            return
        begin, load.asked_at = load.asked, now
        piece = len(load.slots) if self.piece_bytes else self._piece
        end = load.asked = min(begin + piece, len(load.slots))
        blocks = load.expected.tables[0][begin:end]
        self._copy(load.number, load.names[begin:end], blocks, load.slots[begin:end], store=False)

    def _copied(self, load: Load, message: KVCopied, now: float) -> None:
        load.stood_still += max(0.0, now - load.asked_at - message.seconds)
        whole = message.done >= load.asked - load.done
        load.asked = load.done = load.asked if whole else load.done + message.done
        if message.corrupted:
            bad = load.names[load.done : load.done + 1]
            self.counters.corrupted += len(bad)
            self._known.difference_update(bad)
            self.to_keeper.append(TierDrop(joined(bad), True, self._reply_to))
        if not whole:
            self._breaker.failed(now)
            self._end(load, failed=True)
        else:
            self._go_on(load, now)

    def _whole(self, load: Load, now: float) -> None:
        self.rates.loaded(load.done, load.began + load.stood_still, now, self._piece)
        self.counters.load_seconds += now - load.began
        self._breaker.succeeded()
        self._end(load, failed=False)

    def _end(self, load: Load, *, failed: bool) -> None:
        self.counters.loads += 1
        self.counters.failed_loads += failed
        self.counters.hits += load.done
        self.to_keeper.append(TierRelease(load.number, self._reply_to))
        if load.asked > load.done and self.piece_bytes:
            self.to_worker.append(KVForget(self._epoch, load.number))
        self._loads.end(load)

    @crash_only
    def tick(self, now: float) -> None:
        """To be called a few times a second."""
        for load in self._loads.abandoned():
            if now >= load.until:
                self._breaker.failed(now, late=True)
                self.rates.late(len(load.names))
            self._end(load, failed=True)
        self._give_up(self._storing.tick())
        self.counters.missed_stores = self._stores.missed
        self.after_step()
