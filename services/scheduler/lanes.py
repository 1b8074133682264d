"""Items in lanes: an order that changes while they wait."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator
from typing import Generic

from penstock.services.scheduler.ordered_queue import Item, OrderedQueue
from penstock.services.scheduler.sequence import QueueKey

Entry = tuple[float, QueueKey, str]
"""(lane key, first key, lane) as they were when the entry was made."""

SPARE_ENTRIES = 64
"""Dead entries that the heap may hold beside as many as there are lanes."""


class Lanes(Generic[Item]):
    """The lane with the smallest key first; within a lane the item with the smallest key.

    A heap of lanes whose entries may be out of date. A lane's key and its first key only grow (a
    smaller first key makes a new entry), so an entry never stands too far back: whatever comes to
    the top is compared with the truth and goes back to its place. Any number of lanes whose keys
    change with every step cost nothing until there is room in the batch.
    """

    def __init__(self, lane_key: Callable[[str], float]) -> None:
        self._lane_key = lane_key
        self._queues: dict[str, OrderedQueue[Item]] = {}
        self._heap: list[Entry] = []
        self._entries: dict[str, Entry] = {}
        """The one valid entry of each lane."""
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __contains__(self, lane: str) -> bool:
        return lane in self._queues

    def __iter__(self) -> Iterator[Item]:
        """All items, lane by lane."""
        for queue in self._queues.values():
            yield from queue

    def floor(self) -> float | None:
        """The smallest key of a lane; ``None`` when there is no lane."""
        return self._top()[0] if self._queues else None

    def first(self) -> Item:
        """Raises ``IndexError`` when empty."""
        return self._queues[self._top()[2]][0]

    def num_before(self, lane: str, key: QueueKey) -> int:
        """How many come before the item with this key, if its lane and the others go on by turns
        from here: what they will be served meanwhile is not known. O(lanes)."""
        before = self._queues[lane].num_before(key)
        own = self._lane_key(lane), self._queues[lane].first_key()
        found = before
        for other, queue in self._queues.items():
            if other != lane:
                is_first = (self._lane_key(other), queue.first_key()) < own
                found += min(len(queue), before + is_first)
        return found

    def push(self, lane: str, key: QueueKey, item: Item) -> None:
        queue = self._queues.get(lane)
        if queue is None:
            queue = self._queues[lane] = OrderedQueue()
        queue.push(key, item)
        self._count += 1
        if queue.first_key() is key:
            self._enter((self._lane_key(lane), key, lane))

    def remove(self, lane: str, key: QueueKey) -> Item:
        """Raises ``KeyError`` for a key that is not in the lane."""
        queue = self._queues[lane]
        item = queue.remove(key)
        self._count -= 1
        if not len(queue):
            del self._queues[lane]
            del self._entries[lane]
        return item

    def _enter(self, entry: Entry) -> None:
        self._entries[entry[2]] = entry
        heapq.heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + SPARE_ENTRIES:
            self._heap = list(self._entries.values())
            heapq.heapify(self._heap)

    def _top(self) -> Entry:
        """The first lane as it is now. Raises ``IndexError`` when empty."""
        while True:
            entry = self._heap[0]
            lane = entry[2]
            if self._entries.get(lane) is not entry:
                heapq.heappop(self._heap)
                continue
            now = (self._lane_key(lane), self._queues[lane].first_key(), lane)
            if not now > entry:
                return now
            self._entries[lane] = now
            heapq.heapreplace(self._heap, now)
