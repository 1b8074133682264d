"""Memory of the keeper that is taken before it is written: so much and no more."""

from __future__ import annotations

import os
import time

import pytest

from penstock.services.keeper import memory_ahead
from penstock.services.keeper.pool import SlotPool

MIB = 1 << 20


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_ahead, "PIECE_BYTES", MIB)
    monkeypatch.setattr(memory_ahead, "MOST_AHEAD_BYTES", 4 * MIB)


def taken(pool: SlotPool) -> int:
    return os.stat(pool.path.split()[0]).st_blocks * 512


def await_taken(pool: SlotPool, count: int) -> None:
    """No more is taken than that."""
    deadline = time.monotonic() + 60
    while taken(pool) < count:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    time.sleep(0.05)
    assert taken(pool) == count


def test_memory_is_taken_a_bounded_way_ahead_of_the_slots_in_use() -> None:
    pool = SlotPool(32, MIB // 2)
    assert taken(pool) == 0
    pool.take_ahead()
    await_taken(pool, 4 * MIB)
    slots = [pool.take() for _ in range(6)]
    assert slots == [(number, None) for number in range(6)]
    await_taken(pool, 7 * MIB)
    pool.close()


def test_what_is_in_a_slot_stays_when_its_memory_is_taken() -> None:
    pool = SlotPool(8, MIB)
    pool.slot(2)[:3] = b"abc"
    pool.take_ahead()
    await_taken(pool, 4 * MIB)
    assert pool.slot(2)[:4].tobytes() == b"abc\0"
    pool.close()


def test_where_the_host_has_little_no_more_is_taken_than_slots_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_ahead, "_available_bytes", lambda: 4 * MIB)
    pool = SlotPool(8, MIB)
    pool.take_ahead()
    await_taken(pool, MIB)
    pool.close()
