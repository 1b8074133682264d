"""The blocks of one space: one model with one layout, for all engines that have it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    TierGot,
    TierKeys,
    TierLent,
    TierOpened,
    joined,
)
from penstock.services.keeper.disk_threads import DiskThreads, Done
from penstock.services.keeper.disk_tier import DiskTier
from penstock.services.keeper.pool import SlotPool
from penstock.services.keeper.tier import BlockName

Send = Callable[[str, Message], bool]
MOST_LENT_SHARE = 8
"""At most every so many-th slot is lent; all schedulers of the space share them …"""
MOST_LENT_ALL = 2
"""… and have never more than every so many-th: the others are there to be read."""
MOST_WRITING_SHARE = 2
"""At most every so many-th slot waits to be written to disk; what comes beyond is not written."""
PART_BYTES = 64 << 20
"""Of a long read from disk a scheduler is told so much at a time, to copy it while the rest is
read."""
MOST_AHEAD_SHARE = 0.75
"""So much of memory is filled ahead of use, with what was used last before a restart."""
MOST_AHEAD_READS = 32
"""At a time: what somebody waits for is read behind them."""
MOST_TOLD_KEYS = 1 << 20
KEYS_IN_MESSAGE = 1 << 16


@dataclass(slots=True)
class Reading:
    """Blocks that a scheduler waits for, in order."""

    owner: str
    number: int
    keys: list[bytes]
    slots: list[int | None]
    """``None``: not there, or not yet."""
    pending: int = 0
    ready: int = 0
    """So many of the first are there, as far as is known."""
    told: int = 0
    """So many of them the scheduler knows of."""
    released: bool = False


@dataclass(slots=True)
class Owner:
    """What a scheduler has."""

    wanted: int
    lent: set[int] = field(default_factory=set)
    got: dict[int, Reading] = field(default_factory=dict)


class Space:
    def __init__(
        self,
        name: bytes,
        pool: SlotPool,
        send: Send,
        disk: DiskTier | None,
        threads: DiskThreads | None,
    ) -> None:
        self.pool, self.owners = pool, dict[str, Owner]()
        self.skipped_writes = 0
        """Blocks that left memory before the disk, which was behind with others, had taken them."""
        self.name, self._send, self._disk, self._threads = name, send, disk, threads
        self._added: list[bytes] = []
        self._gone: list[bytes] = []
        self._waiting: dict[bytes, list[tuple[Reading, int]]] = {}
        """Key → who waits for it to be read from disk, and in which place."""
        self._dropped_reads: set[bytes] = set()
        """Blocks that must not be used, though they are just being read …"""
        self._writes: dict[int, bytes] = {}
        """What is on its way to the disk, by slot."""
        self._dropped_writes: dict[int, bytes] = {}
        """… or written."""
        self._unwritten: dict[bytes, None] = {}
        """Blocks that wait until fewer are being written, the first ones first."""
        self._ahead: deque[bytes] = deque()
        """What is to be read before anybody asks for it …"""
        self._reading_ahead: set[bytes] = set()
        """… and is being read."""
        self._read_ahead = 0
        """Blocks that were."""

    # --- schedulers come and go

    def open(self, address: str, lent: int) -> None:
        """A scheduler begins, or begins anew. It hears of all keys before it hears that it may
        ask for them."""
        self.leave(address)
        pool = self.pool
        self.owners[address] = owner = Owner(lent)
        on_disk = self._disk.keys(self.name) if self._disk is not None else []
        keys = list(dict.fromkeys([*on_disk, *pool.keys()]))[-MOST_TOLD_KEYS:]
        for begin in range(0, len(keys), KEYS_IN_MESSAGE):
            part = joined(keys[begin : begin + KEYS_IN_MESSAGE])
            self._send(address, TierKeys(self.name, part))
        slots = self._lend(owner)
        self._send(address, TierOpened(self.name, pool.path, pool.num_slots, slots))

    def leave(self, address: str) -> None:
        """A scheduler is gone. Its worker may still write into slots that were lent: a checksum
        that does not fit tells of it."""
        owner = self.owners.pop(address, None)
        if owner is None:
            return
        for reading in owner.got.values():
            self._end(reading)
        for slot in owner.lent:
            self.pool.give_back(slot)

    def _lend(self, owner: Owner) -> list[int]:
        num_slots, slots = self.pool.num_slots, list[int]()
        share = min(owner.wanted, max(1, num_slots // MOST_LENT_SHARE // len(self.owners)))
        room = num_slots // MOST_LENT_ALL - sum(len(one.lent) for one in self.owners.values())
        while len(owner.lent) < share and len(slots) < room and (slot := self._take()) is not None:
            owner.lent.add(slot)
            slots.append(slot)
        return slots

    def _take(self) -> int | None:
        taken = self.pool.take()
        if taken is None:
            return None
        slot, key = taken
        if key is not None and not self._on_disk(key):
            self._gone.append(key)
            if key in self._unwritten:
                del self._unwritten[key]
                self.skipped_writes += 1
        return slot

    def _on_disk(self, key: bytes) -> bool:
        if self._disk is None or (self._dropped_writes and key in self._dropped_writes.values()):
            return False
        return self._disk.has(BlockName(self.name, key))

    # --- put

    def stored(self, address: str, keys: list[bytes], slots: list[int], unused: list[int]) -> None:
        owner = self.owners.get(address)
        if owner is None:
            return
        for key, slot in reversed(list(zip(keys, slots, strict=False))):
            if slot in owner.lent:  # the first of a prefix are the last to be dropped
                owner.lent.discard(slot)
                self._fill(key, slot)
        for slot in unused:
            if slot in owner.lent:
                owner.lent.discard(slot)
                self.pool.give_back(slot)
        for each, one in self.owners.items():  # what one has more than its share, others lack
            if more := self._lend(one):
                self._send(each, TierLent(more))

    def _fill(self, key: bytes, slot: int) -> None:
        self._added.append(key)  # who has stored it waits for this, also where it was there
        if not self.pool.fill(slot, key):
            return
        threads = self._threads
        if threads is None or self._on_disk(key):
            return
        if threads.writing >= self._most_writing:
            self._unwritten[key] = None
            return
        self._write(threads, key, slot)

    @property
    def _most_writing(self) -> int:
        return max(1, self.pool.num_slots // MOST_WRITING_SHARE)

    def _write(self, threads: DiskThreads, key: bytes, slot: int) -> None:
        self.pool.pin(slot)
        self._writes[slot] = key
        threads.write(BlockName(self.name, key), slot, self.pool.slot(slot), self.disk_done)

    def catch_up(self) -> None:
        """Writes that had to wait begin, of blocks that are still in memory."""
        threads = self._threads
        while self._unwritten and threads is not None and threads.writing < self._most_writing:
            key = next(iter(self._unwritten))
            del self._unwritten[key]
            slot = self.pool.slot_of(key)
            if slot is not None and not self._on_disk(key):
                self._write(threads, key, slot)

    # --- get

    def get(self, address: str, number: int, keys: list[bytes]) -> None:
        owner = self.owners.get(address)
        if owner is None:
            self._send(address, TierGot(number, []))
            return
        reading = owner.got[number] = Reading(address, number, keys, [None] * len(keys))
        for place, key in enumerate(keys):
            slot = self.pool.find(key)
            if slot is not None:
                self.pool.pin(slot)
                reading.slots[place] = slot
                if self._disk is not None:
                    self._disk.touch(BlockName(self.name, key))
            elif not self._read(reading, place, key):
                break
        for slot in reversed([slot for slot in reading.slots if slot is not None]):
            self._touch(slot)
        if not reading.pending:
            self._answer(reading)

    def _touch(self, slot: int) -> None:
        key = self.pool.key(slot)
        if key is not None:
            self.pool.find(key)

    def _read(self, reading: Reading, place: int, key: bytes) -> bool:
        """Have a block read from disk, if it is there and there is room."""
        if self._threads is None or not self._on_disk(key):
            return False
        waiting = self._waiting.get(key)
        if waiting is None:
            slot = self._take()
            if slot is None:
                return False
            waiting = self._begin_read(self._threads, key, slot)
        waiting.append((reading, place))
        reading.pending += 1
        return True

    def _begin_read(self, threads: DiskThreads, key: bytes, slot: int) -> list[tuple[Reading, int]]:
        """Returns who waits for it: nobody yet."""
        waiting = self._waiting[key] = []
        name = BlockName(self.name, key)
        threads.read(name, slot, self.pool.slot(slot), self.disk_done)
        return waiting

    def begin_ahead(self, keys: list[bytes]) -> None:
        """Read the last of these blocks, in order, while nobody asks for others."""
        self._ahead.extend(keys[-int(MOST_AHEAD_SHARE * self.pool.num_slots) :])

    def read_ahead(self) -> None:
        """Go on with it, into memory that nothing else has."""
        threads = self._threads
        while self._ahead and threads is not None and threads.reading < MOST_AHEAD_READS:
            key = self._ahead.popleft()
            if self.pool.has(key) or key in self._waiting or not self._on_disk(key):
                continue
            if not self.pool.has_free:
                self._ahead.clear()
            elif (slot := self._take()) is not None:
                self._reading_ahead.add(key)
                self._begin_read(threads, key, slot)

    def take_read_ahead(self) -> int:
        """How many blocks were read ahead, once when all are; else 0."""
        if self._ahead or self._reading_ahead:
            return 0
        count, self._read_ahead = self._read_ahead, 0
        return count

    def disk_done(self, done: Done) -> None:
        key, slot, pool = done.name.key, done.slot, self.pool
        if not done.was_read:
            self._written(done)
            return
        if key in self._reading_ahead:
            self._reading_ahead.discard(key)
            self._read_ahead += 1
        ok = done.ok and key not in self._dropped_reads
        self._dropped_reads.discard(key)
        if not ok:
            pool.give_back(slot)
        elif not pool.fill(slot, key):
            slot = pool.find(key) or 0
        for reading, place in self._waiting.pop(key, []):
            reading.pending -= 1
            if ok:
                pool.pin(slot)
                reading.slots[place] = slot
            if not reading.pending:
                self._answer(reading)
            else:
                self._tell_part(reading)

    def _tell_part(self, reading: Reading) -> None:
        """Say what is there of a read that goes on."""
        slots = reading.slots
        while slots[reading.ready] is not None:  # one at least is not, or none would be pending
            reading.ready += 1
        part = [slot for slot in slots[reading.told : reading.ready] if slot is not None]
        if len(part) * self.pool.slot_bytes >= PART_BYTES and not reading.released:
            reading.told = reading.ready
            self._send(reading.owner, TierGot(reading.number, part, True))

    def _written(self, done: Done) -> None:
        """What was dropped meanwhile must not be found again."""
        key = self._dropped_writes.pop(done.slot, None)
        if key is not None and self._disk is not None:
            self._disk.drop(done.name, corrupted=False)
        self._writes.pop(done.slot, None)
        self.pool.unpin(done.slot)
        self.catch_up()

    def _answer(self, reading: Reading) -> None:
        if reading.released:
            self._unpin(reading)
            return
        end = 0  # a block that was dropped meanwhile has no key any more
        for slot, key in zip(reading.slots, reading.keys, strict=True):
            if slot is None or self.pool.key(slot) != key:
                break
            end += 1
        for slot in reading.slots[end:]:
            if slot is not None:
                self.pool.unpin(slot)
        reading.slots[end:] = []
        found = [slot for slot in reading.slots[reading.told :] if slot is not None]
        if end < len(reading.keys):
            self._gone += [key for key in reading.keys[end:] if not self._has(key)]
        self._send(reading.owner, TierGot(reading.number, found))

    def _has(self, key: bytes) -> bool:
        return self.pool.has(key) or self._on_disk(key)

    def release(self, address: str, number: int) -> None:
        owner = self.owners.get(address)
        if owner is not None and (reading := owner.got.pop(number, None)) is not None:
            self._end(reading)

    def _end(self, reading: Reading) -> None:
        reading.released = True
        if not reading.pending:
            self._unpin(reading)

    def _unpin(self, reading: Reading) -> None:
        for slot in reading.slots:
            if slot is not None:
                self.pool.unpin(slot)
        reading.slots = []

    # --- news

    def drop(self, keys: list[bytes], *, corrupted: bool) -> None:
        """These blocks are not to be used."""
        dropped = set(keys)
        self._dropped_reads |= dropped & self._waiting.keys()
        self._dropped_writes |= {s: key for s, key in self._writes.items() if key in dropped}
        for key in keys:
            self._unwritten.pop(key, None)
            self.pool.drop(key)
            if self._disk is not None and self._on_disk(key):
                self._disk.drop(BlockName(self.name, key), corrupted=corrupted)
            self._gone.append(key)

    def gone_from_disk(self, key: bytes) -> None:
        if not self.pool.has(key):
            self._gone.append(key)

    def tell(self) -> None:
        """Tell all schedulers what has come and gone."""
        if not self._added and not self._gone:
            return
        gone = [key for key in self._gone if not self._has(key)]
        added, self._added, self._gone = self._added, [], []
        for begin in range(0, max(len(added), len(gone)), KEYS_IN_MESSAGE):
            end = begin + KEYS_IN_MESSAGE
            message = TierKeys(self.name, joined(added[begin:end]), joined(gone[begin:end]))
            for address in self.owners:
                self._send(address, message)
