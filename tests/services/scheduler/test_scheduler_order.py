"""The queue that everything ordered stands in."""

from __future__ import annotations

import random

import pytest

from penstock.services.scheduler.ordered_queue import OrderedQueue


def test_a_queue_gives_its_items_in_order_of_their_keys() -> None:
    queue: OrderedQueue[str] = OrderedQueue()
    for key, item in (((2, 0), "c"), ((1, 5), "b"), ((1, 0.5), "a")):
        queue.push(key, item)
    assert list(queue) == ["a", "b", "c"]
    assert queue.first_key() == (1, 0.5)
    assert queue.remove((1, 5)) == "b"
    assert list(queue) == ["a", "c"]
    with pytest.raises(KeyError):
        queue.remove((1, 5))


def test_a_queue_stays_sorted_under_random_use() -> None:
    rng = random.Random(1)
    queue: OrderedQueue[int] = OrderedQueue()
    present: list[int] = []
    for number in range(500):
        if rng.random() < 0.6 or not present:
            key = rng.randrange(10_000) * 1000 + number
            queue.push((key,), key)
            present.append(key)
        else:
            assert queue.remove((gone := present.pop(rng.randrange(len(present))),)) == gone
        assert list(queue) == sorted(present)
        assert len(queue) == len(present)
