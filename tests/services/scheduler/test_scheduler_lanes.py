"""Lanes of waiting items, against the plain definition of their order."""

from __future__ import annotations

import math
import random

import pytest

from penstock.services.scheduler.lanes import SPARE_ENTRIES, Lanes
from penstock.services.scheduler.sequence import QueueKey


def test_the_lane_with_the_smallest_key_goes_first_and_ties_go_to_the_smaller_first_key() -> None:
    keys = {"a": 5.0, "b": 2.0, "c": 2.0}
    lanes: Lanes[str] = Lanes(keys.__getitem__)
    assert lanes.floor() is None
    for lane, key in (("a", 1), ("b", 9), ("b", 4), ("c", 3)):
        lanes.push(lane, (key,), f"{lane}{key}")
    order = []
    while len(lanes):
        order.append(lanes.first())
        lanes.remove(order[-1][0], (int(order[-1][1:]),))
    assert order == ["c3", "b4", "b9", "a1"]
    with pytest.raises(IndexError):
        lanes.first()


def test_lanes_whose_keys_grow_keep_the_right_order_under_random_use() -> None:
    rng = random.Random(3)
    keys = dict.fromkeys("abcdefgh", 0.0)
    lanes: Lanes[str] = Lanes(keys.__getitem__)
    waiting: dict[tuple[str, QueueKey], None] = {}
    for number in range(1500):
        action = rng.random()
        if action < 0.4:
            lane = rng.choice("abcdefgh")
            key: QueueKey = (rng.randrange(50), number)
            if lane not in lanes:
                keys[lane] += rng.randrange(-3, 5)  # an empty lane's key may fall, too
            lanes.push(lane, key, f"{lane}{key}")
            waiting[lane, key] = None
        elif action < 0.75 and waiting:
            lane, key = rng.choice(list(waiting))
            assert lanes.remove(lane, key) == f"{lane}{key}"
            del waiting[lane, key]
        else:
            keys[rng.choice("abcdefgh")] += rng.randrange(4)
        assert len(lanes) == len(waiting)
        assert sorted(lanes) == sorted(f"{lane}{key}" for lane, key in waiting)
        if waiting:
            firsts = {lane: min(k for l2, k in waiting if l2 == lane) for lane, _ in waiting}
            lane = min(firsts, key=lambda lane: (keys[lane], firsts[lane]))
            assert lanes.first() == f"{lane}{firsts[lane]}"
            assert lanes.floor() == keys[lane]


def test_requests_that_come_and_go_leave_nothing_behind() -> None:
    lanes: Lanes[str] = Lanes(lambda lane: 0.0)
    lanes.push("stays", (0,), "stays")
    for number in range(10_000):
        lanes.push(f"lane {number}", (number,), "x")
        lanes.remove(f"lane {number}", (number,))
    assert len(lanes._heap) <= SPARE_ENTRIES + 4
    assert (len(lanes._queues), len(lanes._entries)) == (1, 1)


def test_a_lane_key_that_is_no_number_hangs_nobody() -> None:
    lanes: Lanes[str] = Lanes(lambda lane: math.nan * len(lane))
    lanes.push("a", (1,), "a")
    lanes.push("b", (2,), "b")
    assert lanes.first() in ("a", "b")
