"""Copies of blocks beside steps: bit for bit, in the steps' order, and bounded.

On the CPU the same code runs without streams: what a thread does is then over when it ends.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest
import torch

from penstock.protocol.kv_slots import HEADER_BYTES, slot_bytes
from penstock.protocol.wire.messages.kv_tier import (
    STORES_AT_A_TIME,
    URGENT_STORES,
    KVCopied,
    KVCopies,
    KVForget,
    joined,
)
from penstock.services.keeper.pool import SlotPool
from penstock.services.worker.gpu import block_transfers
from penstock.services.worker.gpu.block_transfers import BlockTransfers
from penstock.services.worker.gpu.transfer_parts import Mark

SPACE = b"s" * 16
BLOCKS, SHAPE = 40, (3, 2, 2, 16, 8)
BYTES = 2 * 3 * 2 * 2 * 16 * 8
NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICES = ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_GPU])]


def name(number: int) -> bytes:
    return number.to_bytes(16, "little")


@pytest.fixture
def pool() -> Iterator[SlotPool]:
    pool = SlotPool(64, slot_bytes(BYTES))
    yield pool
    pool.close()


@pytest.fixture(autouse=True)
def _small_staging(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of two blocks, eight of them for stores."""
    monkeypatch.setattr(block_transfers, "GROUP_BYTES", 2 * slot_bytes(BYTES))
    monkeypatch.setattr(block_transfers, "LOAD_BYTES", 2 * slot_bytes(BYTES))
    monkeypatch.setattr(block_transfers, "TIER_STAGING_BYTES", 16 * slot_bytes(BYTES))


def random_blocks(device: str) -> torch.Tensor:
    blocks = torch.randn(BLOCKS, *SHAPE, generator=torch.Generator().manual_seed(1))
    return blocks.to(torch.bfloat16).to(device)


def copies_of(
    pool: SlotPool, numbers: list[int], *, store: bool, number: int = 1, shift: int = 0
) -> KVCopies:
    """Block n is kept as n - shift, in the slot of that number."""
    kept = [each - shift for each in numbers]
    keys = joined([name(each) for each in kept])
    return KVCopies(1, 0, number, pool.path, store, numbers, kept, keys)


def execute(transfers: BlockTransfers, message: KVCopies) -> KVCopied:
    answer = transfers.answer(message, 1, 0, 0)
    if answer is not None:
        return answer
    return awaited(transfers)


def awaited(transfers: BlockTransfers) -> KVCopied:
    deadline = time.monotonic() + 60
    while not (answers := transfers.finished()):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    (answer,) = answers
    assert not transfers.active
    return answer


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_come_back_bit_for_bit_in_other_places(pool: SlotPool, device: str) -> None:
    blocks = random_blocks(device)
    before = blocks.clone()
    transfers = BlockTransfers(blocks, SPACE)
    numbers = [3, 0, 7, 5, 6]
    assert execute(transfers, copies_of(pool, numbers, store=True)).done == 5
    places = [each + 20 for each in numbers]
    answer = execute(transfers, copies_of(pool, places, store=False, shift=20))
    assert (answer.done, answer.corrupted, answer.failure) == (5, False, "")
    assert torch.equal(blocks[places], before[numbers])
    untouched = [each for each in range(BLOCKS) if each not in places]
    assert torch.equal(blocks[untouched], before[untouched])


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_stored_is_what_was_there_behind_the_step(pool: SlotPool, device: str) -> None:
    blocks = random_blocks(device)
    before = blocks.clone()
    transfers = BlockTransfers(blocks, SPACE)
    large = torch.ones(4096, 4096, device=device) if device == "cuda" else None
    for number in range(20):
        first = [2 * number, 2 * number + 1]
        if large is not None:
            large @ large  # the step is still under way
        assert transfers.answer(copies_of(pool, first, store=True, number=number), 1, 0, 0) is None
        blocks[first] = 0  # the next step
        assert awaited(transfers).done == 2
    everything = list(range(BLOCKS))
    assert execute(transfers, copies_of(pool, everything, store=False)).done == BLOCKS
    assert torch.equal(blocks, before)


def test_a_damaged_block_ends_a_load_at_its_place(pool: SlotPool) -> None:
    blocks = random_blocks("cpu")
    transfers = BlockTransfers(blocks, SPACE, threads=3)
    numbers = list(range(12))
    assert execute(transfers, copies_of(pool, numbers, store=True)).done == 12
    for slot in (5, 9):
        pool.slot(slot)[HEADER_BYTES + 8] ^= 1
    answer = execute(transfers, copies_of(pool, numbers, store=False))
    assert (answer.done, answer.corrupted) == (5, True)


def test_stores_beyond_the_staging_are_not_made(pool: SlotPool) -> None:
    transfers = BlockTransfers(random_blocks("cpu"), SPACE)
    answer = execute(transfers, copies_of(pool, list(range(20)), store=True))
    assert answer.done == 16
    most = STORES_AT_A_TIME + URGENT_STORES
    assert most * transfers.piece_bytes <= 16 * slot_bytes(BYTES), "there is room for all of them"
    assert execute(transfers, copies_of(pool, list(range(20)), store=True)).done == 16, "it is back"


def test_a_step_waits_for_few_copies_however_small_the_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(block_transfers, "TIER_STAGING_BYTES", 400 * slot_bytes(BYTES))
    transfers = BlockTransfers(random_blocks("cpu"), SPACE)
    assert transfers.piece_bytes == 32 * slot_bytes(BYTES)


def test_a_load_that_is_forgotten_writes_nothing_more_and_is_not_answered(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = random_blocks("cpu")
    transfers = BlockTransfers(blocks, SPACE, threads=1)
    assert execute(transfers, copies_of(pool, [1, 2, 3, 4], store=True)).done == 4
    before, check = blocks.clone(), block_transfers.holds
    reached, go_on = threading.Event(), threading.Event()

    def holds(slot: memoryview, space: bytes, key: bytes) -> bool:
        reached.set()
        assert go_on.wait(60)
        return check(slot, space, key)

    monkeypatch.setattr(block_transfers, "holds", holds)
    message = copies_of(pool, [21, 22, 23, 24], store=False, number=2, shift=20)
    assert transfers.answer(message, 1, 0, 0) is None
    assert reached.wait(60)
    transfers.answer(KVForget(2, 2), 1, 0, 0)
    assert transfers.active, "that was of another epoch"
    transfers.answer(KVForget(1, 2), 1, 0, 0)
    go_on.set()
    store = copies_of(pool, [1], store=True, number=3)
    assert execute(transfers, store) == KVCopied(1, 3, 1, pytest.approx(0, abs=60))
    assert torch.equal(blocks, before)


def test_a_load_begins_when_the_steps_before_it_are_over(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = random_blocks("cpu")
    transfers = BlockTransfers(blocks, SPACE, threads=1)
    before = blocks.clone()
    assert execute(transfers, copies_of(pool, [1, 2], store=True)).done == 2
    steps_over = threading.Event()
    monkeypatch.setattr(Mark, "is_passed", property(lambda _: steps_over.is_set()))
    load = copies_of(pool, [21, 22], store=False, number=2, shift=20)
    assert transfers.answer(load, 1, 0, 0) is None
    store = copies_of(pool, [3], store=True, number=3)
    assert transfers.answer(store, 1, 0, 0) is None
    while not (answers := transfers.finished()):
        time.sleep(0.001)
    assert [one.number for one in answers] == [3], "a store waits for no step"
    assert torch.equal(blocks, before)
    steps_over.set()
    assert awaited(transfers).number == 2
    assert torch.equal(blocks[[21, 22]], before[[1, 2]])


def test_of_loads_that_come_together_the_shortest_is_there_first(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    transfers = BlockTransfers(random_blocks("cpu"), SPACE, threads=1)
    assert execute(transfers, copies_of(pool, list(range(14)), store=True)).done == 14
    reached, go_on = threading.Event(), threading.Event()
    check, order = block_transfers.holds, list[bytes]()

    def holds(slot: memoryview, space: bytes, key: bytes) -> bool:
        reached.set()
        assert go_on.wait(60)
        order.append(key)
        return check(slot, space, key)

    monkeypatch.setattr(block_transfers, "holds", holds)
    for number, first, count in ((2, 0, 6), (3, 6, 6), (4, 12, 2)):
        numbers = list(range(20 + first, 20 + first + count))
        load = copies_of(pool, numbers, store=False, number=number, shift=20)
        assert transfers.answer(load, 1, 0, 0) is None
        assert reached.wait(60)
    go_on.set()
    answered: list[int] = []
    while len(answered) < 3:
        answered += [one.number for one in transfers.finished()]
        time.sleep(0.001)
    begun = [0, 1]
    rest = [12, 13, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11]
    assert order == [name(each) for each in begun + rest]


def test_a_long_load_is_not_overtaken_for_ever(
    pool: SlotPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_transfers, "OVERTAKING", 1)
    transfers = BlockTransfers(random_blocks("cpu"), SPACE, threads=1)
    assert execute(transfers, copies_of(pool, list(range(14)), store=True)).done == 14
    reached, go_on = threading.Event(), threading.Event()
    check = block_transfers.holds

    def holds(slot: memoryview, space: bytes, key: bytes) -> bool:
        reached.set()
        assert go_on.wait(60)
        return check(slot, space, key)

    monkeypatch.setattr(block_transfers, "holds", holds)
    for number, first, count in ((2, 0, 8), (3, 8, 2), (4, 10, 2), (5, 12, 2)):
        numbers = list(range(20 + first, 20 + first + count))
        load = copies_of(pool, numbers, store=False, number=number, shift=20)
        assert transfers.answer(load, 1, 0, 0) is None
        assert reached.wait(60)
    go_on.set()
    answered: list[int] = []
    while len(answered) < 4:
        answered += [one.number for one in transfers.finished()]
        time.sleep(0.001)
    assert answered == [2, 3, 4, 5]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"after": 4}, ""),
        ({"epoch": 2}, ""),
        ({"pool": "/proc/1/fd/1 other"}, "is no shared memory"),
        ({"slots": [64]}, "there is no slot 64"),
        ({"blocks": [BLOCKS]}, "there is no block 40"),
    ],
    ids=str,
)
def test_what_is_out_of_turn_or_nowhere_is_not_copied(
    pool: SlotPool, message: dict[str, object], reason: str
) -> None:
    transfers = BlockTransfers(random_blocks("cpu"), SPACE)
    fields: dict[str, object] = {
        "epoch": 1, "after": 0, "number": 1, "pool": pool.path, "store": True, "blocks": [1],
        "slots": [1], "keys": name(1),
    }  # fmt: skip
    answer = transfers.answer(KVCopies(**(fields | message)), 1, 0, 0)  # type: ignore[arg-type]
    assert answer is not None
    assert answer.done == 0
    assert reason in answer.failure
    assert not transfers.active
