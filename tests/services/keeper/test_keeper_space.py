"""The keeper's slots: lent, filled, read, and given to others when their time has come."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

import pytest

from penstock.protocol.kv_slots import HEADER_BYTES, holds, seal, slot_bytes
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import TierGot, TierKeys, TierLent, TierOpened, split
from penstock.services.keeper import space
from penstock.services.keeper.disk_threads import DiskThreads
from penstock.services.keeper.disk_tier import DiskTier
from penstock.services.keeper.pool import SlotPool
from penstock.services.keeper.space import Space

T = TypeVar("T")
SPACE = b"s" * 16
BLOCK_BYTES = 100


class Kept:
    """A space with one scheduler, S."""

    def __init__(
        self, slots: int, folder: Path | None = None, lent: int = 2, paused: bool = False
    ) -> None:
        self.said: list[tuple[str, Message]] = []
        self.disk = DiskTier(folder, 1 << 20) if folder is not None else None
        if self.disk is not None:
            self.disk.scan()
        self.threads = DiskThreads(self.disk) if self.disk is not None else None
        self.tasks: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.paused = paused
        if paused and self.threads is not None:
            self.threads._reads = self.threads._writes = self.tasks
        self.pool = SlotPool(slots, slot_bytes(BLOCK_BYTES))
        self.space = Space(SPACE, self.pool, self._send, self.disk, self.threads)
        self.space.open("S", lent)
        self.lent = self.last(TierOpened).slots

    def _send(self, address: str, message: Message) -> bool:
        self.said.append((address, message))
        return True

    def last(self, kind: type[T]) -> T:
        return [message for _, message in self.said if isinstance(message, kind)][-1]

    def store(self, key: bytes) -> None:
        slot = self.lent.pop()
        place = self.pool.slot(slot)
        place[HEADER_BYTES : HEADER_BYTES + BLOCK_BYTES] = key[:1] * BLOCK_BYTES
        seal(place, SPACE, key, BLOCK_BYTES)
        self.space.stored("S", [key], [slot], [])
        self.lent += self.last(TierLent).slots
        if not self.paused:
            self.settle()

    def get(self, number: int, *keys: bytes) -> list[int]:
        self.space.get("S", number, list(keys))
        self.settle()
        found = self.last(TierGot)
        assert found.number == number
        return found.slots

    def do(self, count: int) -> None:
        """The disk, which is paused, does so much."""
        for _ in range(count):
            self.tasks.get_nowait()()

    def hear(self) -> None:
        """The keeper hears what the disk has done."""
        assert self.threads is not None
        for done in self.threads.take_done():
            done.then(done)

    def settle(self) -> None:
        """Let the disk do all that it is to do."""
        while self.threads is not None and (self.threads.reading or self.threads.writing):
            for done in self.threads.take_done():
                done.then(done)
            time.sleep(0.001)
        self.space.tell()


def key(number: int) -> bytes:
    return bytes([number]) * 16


def test_a_stored_block_is_told_of_and_found() -> None:
    kept = Kept(8)
    kept.store(key(1))
    assert split(kept.last(TierKeys).added) == [key(1)]
    (slot,) = kept.get(1, key(1), key(2))
    assert holds(kept.pool.slot(slot), SPACE, key(1))
    assert kept.get(2, key(2), key(1)) == []


def test_the_block_used_least_lately_makes_room_unless_it_is_being_read() -> None:
    kept = Kept(8, lent=1)
    for number in range(7):
        kept.store(key(number))
    assert split(kept.last(TierKeys).gone) == []
    (pinned,) = kept.get(1, key(0))
    kept.store(key(7))
    kept.store(key(8))
    assert kept.pool.has(key(0))
    assert not kept.pool.has(key(1))
    assert holds(kept.pool.slot(pinned), SPACE, key(0))
    assert key(2) in split(kept.last(TierKeys).gone)


def test_what_a_lost_scheduler_had_is_free_again() -> None:
    kept = Kept(8)
    kept.store(key(1))
    kept.get(1, key(1))
    kept.space.leave("S")
    free = 0
    while kept.pool.take() is not None:
        free += 1
    assert free == 8


def test_a_slot_that_was_not_lent_is_not_taken_for_a_block() -> None:
    kept = Kept(8)
    kept.space.stored("S", [key(1)], [7 if 7 not in kept.lent else 0], [])
    assert not kept.pool.has(key(1))
    kept.space.stored("nobody", [key(1)], [kept.lent[0]], [])
    assert not kept.pool.has(key(1))


def test_a_block_that_left_memory_comes_back_from_disk_also_after_a_restart(tmp_path: Path) -> None:
    kept = Kept(8, tmp_path)
    for number in range(12):
        kept.store(key(number))
    assert not kept.pool.has(key(0))
    slots = kept.get(1, key(0), key(1), key(11))
    assert [holds(kept.pool.slot(s), SPACE, key(n)) for s, n in zip(slots, (0, 1, 11), strict=True)]
    again = Kept(8, tmp_path)
    assert set(split(again.last(TierKeys).added)) == {key(number) for number in range(12)}
    (slot,) = again.get(1, key(5))
    assert holds(again.pool.slot(slot), SPACE, key(5))
    assert bytes(again.pool.slot(slot)[HEADER_BYTES : HEADER_BYTES + 3]) == b"\x05\x05\x05"


def test_a_long_read_from_disk_is_told_of_in_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [bytes([number]) * 16 for number in range(1, 8)]
    before = Kept(16, tmp_path)
    for key in keys:
        before.store(key)
    monkeypatch.setattr(space, "PART_BYTES", 2 * slot_bytes(BLOCK_BYTES))
    kept = Kept(16, tmp_path, paused=True)
    kept.space.get("S", 1, keys)
    for _ in keys:
        kept.do(1)
        kept.hear()
    told = [message for _, message in kept.said if isinstance(message, TierGot)]
    assert [(len(one.slots), one.more) for one in told] == [
        (2, True),
        (2, True),
        (2, True),
        (1, False),
    ]
    slots = [slot for one in told for slot in one.slots]
    assert [kept.pool.key(slot) for slot in slots] == keys
    kept.space.release("S", 1)
    assert not any(kept.pool._pins)


def test_a_damaged_file_ends_what_is_found(tmp_path: Path) -> None:
    kept = Kept(8, tmp_path)
    for number in range(3):
        kept.store(key(number))
    path = next(tmp_path.rglob(f"{key(1).hex()}.kv"))
    path.write_bytes(path.read_bytes()[:50])
    again = Kept(8, tmp_path)
    assert len(again.get(1, key(0), key(1), key(2))) == 1
    assert again.disk is not None
    assert again.disk.corrupted == 1
    assert key(1) in split(again.last(TierKeys).gone)


def test_a_block_that_is_dropped_is_nowhere(tmp_path: Path) -> None:
    kept = Kept(8, tmp_path)
    kept.store(key(1))
    kept.space.drop([key(1)], corrupted=True)
    assert kept.get(1, key(1)) == []
    assert not list(tmp_path.rglob("*.kv"))


@pytest.mark.parametrize("written", [False, True])
def test_a_block_that_is_dropped_while_it_is_written_to_disk_stays_nowhere(
    tmp_path: Path, written: bool
) -> None:
    kept = Kept(8, tmp_path, paused=True)
    kept.store(key(1))
    if written:
        kept.do(1)
    kept.space.drop([key(1)], corrupted=False)
    if not written:
        kept.do(1)
    kept.space.get("S", 1, [key(1)])
    assert kept.last(TierGot).slots == []
    kept.hear()
    assert kept.tasks.empty()
    assert not list(tmp_path.rglob("*.kv"))
    kept.store(key(1))
    kept.do(1)
    kept.hear()
    assert len(list(tmp_path.rglob("*.kv"))) == 1


@pytest.mark.parametrize("read", [False, True])
def test_a_block_that_is_dropped_while_it_is_read_is_given_to_nobody(
    tmp_path: Path, read: bool
) -> None:
    before = Kept(8, tmp_path)
    for number in range(2):
        before.store(key(number))
    kept = Kept(8, tmp_path, paused=True)
    kept.space.get("S", 1, [key(0), key(1)])
    kept.do(1)
    if read:
        kept.do(1)
    else:
        kept.hear()
    kept.space.drop([key(0)], corrupted=False)
    if not read:
        kept.do(1)
    kept.hear()
    assert kept.last(TierGot).slots == []
    kept.space.release("S", 1)
    assert not kept.pool.has(key(0))
    assert kept.pool.has(key(1))


@pytest.mark.parametrize("owners", [1, 4, 16])
def test_many_schedulers_leave_slots_to_be_read(owners: int) -> None:
    kept = Kept(64, lent=100)
    for number in range(1, owners):
        kept.space.open(f"S{number}", 100)
    lent = [slot for _, said in kept.said if isinstance(said, TierOpened) for slot in said.slots]
    assert len(lent) == len(set(lent)) <= 32
    assert all(one.lent for one in kept.space.owners.values())
    kept.space.leave("S")
    assert sum(len(one.lent) for one in kept.space.owners.values()) <= 32


def test_a_scheduler_without_slots_gets_some_when_another_one_gives_some_back() -> None:
    kept = Kept(8)
    for number in range(1, 5):
        kept.space.open(f"S{number}", 2)
    assert not kept.last(TierOpened).slots
    kept.space.stored("S", [], [], kept.lent)
    assert [to for to, said in kept.said if isinstance(said, TierLent)] == ["S"]
    kept.space.leave("S1")
    kept.space.stored("S", [], [], kept.last(TierLent).slots)
    assert {to for to, said in kept.said if isinstance(said, TierLent)} == {"S", "S4"}


def test_slots_of_a_lost_scheduler_are_lent_after_all_others() -> None:
    kept = Kept(32)
    first = set(kept.lent)
    kept.space.open("S", 2)
    assert not first & set(kept.last(TierOpened).slots)


def test_what_the_disk_was_too_slow_for_is_written_later(tmp_path: Path) -> None:
    kept = Kept(8, tmp_path, paused=True)
    for number in range(6):
        kept.store(key(number))
    assert kept.tasks.qsize() == 4
    for _ in range(6):
        kept.do(1)
        kept.hear()
    assert kept.tasks.empty()
    assert len(list(tmp_path.rglob("*.kv"))) == 6
    assert not kept.space.skipped_writes


def test_a_block_that_leaves_memory_before_the_disk_had_time_for_it_is_counted(
    tmp_path: Path,
) -> None:
    kept = Kept(8, tmp_path, paused=True, lent=1)
    for number in range(9):
        kept.store(key(number))
    assert kept.space.skipped_writes == 2
    assert not kept.pool.has(key(4))


def test_a_block_that_is_read_from_memory_is_not_the_next_to_leave_the_disk(
    tmp_path: Path,
) -> None:
    kept = Kept(8, tmp_path)
    assert kept.disk is not None
    kept.disk.limit = 3 * kept.pool.slot_bytes
    for number in range(3):
        kept.store(key(number))
    kept.get(1, key(0))
    kept.store(key(3))
    assert set(kept.disk.keys(SPACE)) == {key(0), key(2), key(3)}


def test_reads_and_writes_go_on_after_a_task_that_failed(tmp_path: Path) -> None:
    kept = Kept(8, tmp_path)
    kept.store(key(1))
    assert kept.threads is not None

    def fail() -> None:
        raise OSError("looking through the folder failed")

    kept.threads.first(fail)
    again = Kept(8, tmp_path)
    assert again.threads is not None
    again.threads.first(fail)
    assert len(again.get(1, key(1))) == 1


def test_a_closed_pool_is_found_by_nobody_and_read_to_the_end(tmp_path: Path) -> None:
    before = Kept(8, tmp_path)
    before.store(key(1))
    kept = Kept(8, tmp_path, paused=True)
    kept.space.get("S", 1, [key(1)])
    path = Path(kept.pool.path.split()[0])
    assert path.exists()
    kept.pool.close()
    assert not path.exists()
    kept.do(1)
    kept.hear()
    assert holds(kept.pool.slot(kept.last(TierGot).slots[0]), SPACE, key(1))


def test_it_is_said_once_how_much_was_read_ahead(tmp_path: Path) -> None:
    before = Kept(8, tmp_path)
    for number in range(3):
        before.store(key(number))
    kept = Kept(8, tmp_path, paused=True)
    assert kept.disk is not None
    kept.space.begin_ahead(kept.disk.keys(SPACE))
    kept.space.read_ahead()
    kept.do(2)
    kept.hear()
    assert kept.space.take_read_ahead() == 0
    kept.do(1)
    kept.hear()
    assert [kept.space.take_read_ahead() for _ in range(2)] == [3, 0]


def test_what_waited_for_the_writes_of_another_space_is_written_behind_them(
    tmp_path: Path,
) -> None:
    kept = Kept(8, tmp_path, paused=True)
    assert kept.threads is not None
    kept.threads.writing = 4  # another space's
    kept.store(key(1))
    assert kept.tasks.empty()
    kept.threads.writing = 0
    kept.space.catch_up()
    kept.do(1)
    kept.hear()
    assert len(list(tmp_path.rglob("*.kv"))) == 1
