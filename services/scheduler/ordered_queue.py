"""A queue kept in the order of its keys, from which any item can leave at once."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, TypeVar

from penstock.services.scheduler.sequence import QueueKey

Item = TypeVar("Item")


class OrderedQueue(Generic[Item]):
    """Items by unique key, smallest first.

    Two sorted lists instead of a heap: an item that leaves from the middle leaves no garbage,
    and the order can be read. Insertion moves memory (8 bytes an item), 1 µs for 4096 items.
    """

    def __init__(self) -> None:
        self._keys: list[QueueKey] = []
        self._items: list[Item] = []

    def __len__(self) -> int:
        return len(self._items)

    def __getitem__(self, index: int) -> Item:
        return self._items[index]

    def __iter__(self) -> Iterator[Item]:
        return iter(self._items)

    def first_key(self) -> QueueKey:
        """Raises ``IndexError`` when empty."""
        return self._keys[0]

    def num_before(self, key: QueueKey) -> int:
        """How many have a smaller key."""
        return bisect_left(self._keys, key)

    def push(self, key: QueueKey, item: Item) -> None:
        index = bisect_left(self._keys, key)
        self._keys.insert(index, key)
        self._items.insert(index, item)

    def remove(self, key: QueueKey) -> Item:
        """Raises ``KeyError`` for a key that is not in the queue."""
        index = bisect_left(self._keys, key)
        if index == len(self._keys) or self._keys[index] != key:
            raise KeyError(key)
        del self._keys[index]
        return self._items.pop(index)
