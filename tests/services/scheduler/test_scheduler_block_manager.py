"""Blocks: counts, sharing, and what is reused first."""

from __future__ import annotations

import random

import pytest

from penstock.services.scheduler.block_manager import BlockManager


def test_blocks_go_out_once_and_come_back() -> None:
    blocks = BlockManager(4)
    taken = blocks.allocate(4)
    assert sorted(taken) == [0, 1, 2, 3]
    assert (blocks.num_available, blocks.num_used) == (0, 4)
    blocks.release(taken[:2])
    assert (blocks.num_free, blocks.num_used) == (2, 2)
    blocks.check([taken[2:]])


def test_a_shared_block_is_used_until_its_last_holder_leaves() -> None:
    blocks = BlockManager(3)
    first = blocks.allocate(2)
    blocks.cache(first[0], b"a", step=1)
    second = blocks.match([b"a", b"b"])
    assert second == first[:1]
    assert blocks.num_unheld(second) == 0
    blocks.hold(second)
    blocks.release(first)
    blocks.check([second])
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (1, 0, 2)
    blocks.release(second)
    assert (blocks.num_used, blocks.num_cached, blocks.num_free) == (0, 1, 2)
    assert blocks.num_unheld(second) == 1


def test_a_match_ends_at_the_first_block_that_is_not_known() -> None:
    blocks = BlockManager(4)
    for block, digest in zip(blocks.allocate(2), (b"a", b"c"), strict=True):
        blocks.cache(block, digest, step=1)
    assert len(blocks.match([b"a", b"b", b"c"])) == 1


def test_free_blocks_go_before_cached_ones_and_the_end_of_a_prefix_before_its_beginning() -> None:
    blocks = BlockManager(4)
    table = blocks.allocate(3)
    for block, digest in zip(table, (b"a", b"b", b"c"), strict=True):
        blocks.cache(block, digest, step=1)
    blocks.release(table)
    assert blocks.allocate(1) == [3]
    assert blocks.match([b"a", b"b", b"c"]) == table
    blocks.allocate(1)
    assert blocks.match([b"a", b"b", b"c"]) == table[:2]
    blocks.allocate(1)
    assert blocks.match([b"a", b"b", b"c"]) == table[:1]


def test_the_least_recently_used_cached_block_goes_first() -> None:
    blocks = BlockManager(2)
    old, new = blocks.allocate(2)
    blocks.cache(old, b"old", step=1)
    blocks.cache(new, b"new", step=1)
    blocks.release([old])
    blocks.release([new])
    again = blocks.match([b"old"])
    blocks.hold(again)
    blocks.release(again)
    assert blocks.allocate(1) == [new]
    assert blocks.match([b"old"]) == [old]


def test_of_two_blocks_with_one_content_the_first_stays_known() -> None:
    blocks = BlockManager(2)
    first, second = blocks.allocate(2)
    blocks.cache(first, b"a", step=1)
    blocks.cache(second, b"a", step=2)
    blocks.release([first, second])
    blocks.check([])
    assert blocks.match([b"a"]) == [first]
    assert (blocks.num_cached, blocks.num_free) == (1, 1)


def test_forgotten_blocks_are_free_or_stay_with_their_holder() -> None:
    blocks = BlockManager(3)
    table = blocks.allocate(3)
    for step, (block, digest) in enumerate(zip(table, (b"a", b"b", b"c"), strict=True)):
        blocks.cache(block, digest, step)
    blocks.release(table[:2])
    blocks.forget_since(1)
    blocks.check([table[2:]])
    assert blocks.match([b"a"]) == table[:1]
    assert blocks.match([b"b"]) == blocks.match([b"c"]) == []
    blocks.forget([b"a", b"unknown"])
    assert (blocks.num_free, blocks.num_cached) == (2, 0)


def test_whoever_follows_the_cache_hears_of_each_block_that_can_be_found_no_more() -> None:
    evicted: list[bytes] = []
    blocks = BlockManager(3)
    blocks.on_evicted = evicted.append
    table = blocks.allocate(3)
    for step, (block, digest) in enumerate(zip(table, (b"a", b"b", b"c"), strict=True)):
        blocks.cache(block, digest, step)
    blocks.release(table)
    assert evicted == []
    blocks.allocate(1)
    assert evicted == [b"c"]
    blocks.forget_since(1)
    assert evicted == [b"c", b"b"]
    blocks.forget_all()
    assert evicted == [b"c", b"b", b"a"]


def test_check_sees_a_leak() -> None:
    blocks = BlockManager(2)
    blocks.allocate(1)
    with pytest.raises(RuntimeError, match="reference counts"):
        blocks.check([])


@pytest.mark.parametrize("seed", range(5))
def test_counts_stay_right_whatever_happens(seed: int) -> None:
    rng = random.Random(seed)
    blocks = BlockManager(12)
    tables: list[list[int]] = []
    for step in range(400):
        if rng.random() < 0.5 and blocks.num_available:
            chain = [bytes([rng.randrange(3), depth]) for depth in range(3)]
            table = blocks.match(chain)
            blocks.hold(table)
            known = len(table)
            table += blocks.allocate(rng.randint(0, min(3, blocks.num_available)))
            for index in range(known, min(len(table), 3)):
                blocks.cache(table[index], chain[index], step)
            tables.append(table)
        elif tables:
            blocks.release(tables.pop(rng.randrange(len(tables))))
        if rng.random() < 0.02:
            blocks.forget_since(step - 5)
        blocks.check(tables)
        assert blocks.num_free + blocks.num_cached + blocks.num_used == blocks.num_blocks
