"""Copies between KV memory and the keeper's: right whoever else writes into its slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocol.kv_slots import HEADER_BYTES, holds, open_pool, slot_bytes
from penstock.protocol.wire.messages.kv_tier import KVCopied, KVCopies
from penstock.services.keeper.pool import SlotPool
from penstock.services.worker import kv_copies
from penstock.services.worker.kv_copies import BlockCopies

SPACE, KEY = b"s" * 16, b"k" * 16
SIZE = 100
RIGHT, WRONG = b"r" * SIZE, b"w" * SIZE


class Blocks:
    """KV memory of four blocks, and another worker that writes into slot 1 at the same time."""

    block_bytes, layout = SIZE, "test"

    def __init__(self, pool: SlotPool) -> None:
        self.content = [RIGHT] * 4
        self._pool = pool

    def disturb(self) -> None:
        self._pool.slot(1)[HEADER_BYTES : HEADER_BYTES + SIZE] = WRONG

    def read(self, block: int, into: memoryview) -> None:
        into[:] = self.content[block]
        self.disturb()

    def write(self, block: int, content: memoryview) -> None:
        self.content[block] = bytes(content)


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(8, slot_bytes(SIZE))
    yield pool
    pool.close()


def copied(copies: BlockCopies, pool: str, *, store: bool) -> KVCopied:
    return copies.execute(KVCopies(1, 0, 1, pool, store, [2], [1], KEY))


def test_what_is_stored_under_a_name_is_what_was_sealed(pool: SlotPool) -> None:
    copies = BlockCopies(Blocks(pool), 4, SPACE)
    assert copied(copies, pool.path, store=True).done == 1
    slot = pool.slot(1)
    assert holds(slot, SPACE, KEY)
    assert slot[HEADER_BYTES : HEADER_BYTES + SIZE] == RIGHT


def test_what_is_loaded_is_what_was_checked(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = Blocks(pool)
    copies = BlockCopies(blocks, 4, SPACE)
    copied(copies, pool.path, store=True)

    def holds_then_changes(slot: memoryview, space: bytes, key: bytes) -> bool:
        found = holds(slot, space, key)
        blocks.disturb()
        return found

    monkeypatch.setattr(kv_copies, "holds", holds_then_changes)
    assert copied(copies, pool.path, store=False).done == 1
    assert blocks.content[2] == RIGHT
    answer = copied(copies, pool.path, store=False)
    assert answer.corrupted
    assert not answer.done


def test_memory_of_a_keeper_that_is_gone_is_refused(pool: SlotPool) -> None:
    other = SlotPool(8, slot_bytes(SIZE))
    place = other.path.split()[0]
    name = pool.path.split()[1]
    answer = copied(BlockCopies(Blocks(pool), 4, SPACE), f"{place} {name}", store=True)
    assert "is not the shared memory" in answer.failure
    other.close()
    answer = copied(BlockCopies(Blocks(pool), 4, SPACE), other.path, store=True)
    assert "FileNotFoundError" in answer.failure


def test_what_is_no_keeper_s_memory_is_refused_without_waiting(
    pool: SlotPool, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "pipe")
    descriptor = os.open(tmp_path / "pipe", os.O_RDWR)
    name, before = pool.path.split()[1], os.listdir("/proc/self/fd")
    for path in (f"/proc/self/fd/{descriptor}", f"/proc/{os.getpid()}/fd/{descriptor}"):
        with pytest.raises(ValueError, match=r"no shared memory|is not the shared memory"):
            open_pool(f"{path} {name}", pool.slot_bytes)
    with pytest.raises(ValueError, match="blocks of 64 bytes"):
        open_pool(pool.path, 64)
    assert os.listdir("/proc/self/fd") == before
    os.close(descriptor)
