"""Reads and writes of a tier, beside the keeper's loop: several threads read and one writes."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import NamedTuple

from penstock.services.keeper.tier import BlockName, KVTier

_LOG = logging.getLogger(__name__)
READERS = max(2, min(8, len(os.sched_getaffinity(0)) // 2))
"""A thread reads and checks blocks more slowly than disks, or the system's memory, give them."""


class Done(NamedTuple):
    """A read or a write is over; ``ok``: it did what it was to do."""

    name: BlockName
    slot: int
    ok: bool
    was_read: bool
    then: Callable[[Done], None]
    """Whom to tell, in the keeper's own thread."""


class DiskThreads:
    def __init__(self, tier: KVTier) -> None:
        self._tier = tier
        self._reads: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._writes: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._done: deque[Done] = deque()
        self.reading = self.writing = 0
        """Reads and writes that are not taken back yet."""
        threads = [(self._reads, "disk reads")] * READERS + [(self._writes, "disk writes")]
        for queue, name in threads:
            threading.Thread(target=_run, args=(queue,), name=name, daemon=True).start()

    def first(self, task: Callable[[], None]) -> None:
        """Let a reader do something else; nothing may be asked for until that is over."""
        self._reads.put(task)

    def read(
        self, name: BlockName, slot: int, into: memoryview, then: Callable[[Done], None]
    ) -> None:
        self.reading += 1
        self._reads.put(
            lambda: self._done.append(Done(name, slot, self._get(name, into), True, then))
        )

    def write(
        self, name: BlockName, slot: int, block: memoryview, then: Callable[[Done], None]
    ) -> None:
        self.writing += 1
        self._writes.put(
            lambda: self._done.append(Done(name, slot, self._put(name, block), False, then))
        )

    def _get(self, name: BlockName, into: memoryview) -> bool:
        try:
            return self._tier.get(name, into)
        except Exception:  # a thread that ends would leave all who wait without an answer
            return False

    def _put(self, name: BlockName, block: memoryview) -> bool:
        try:
            return self._tier.put(name, block)
        except Exception:
            return False

    def take_done(self) -> list[Done]:
        """What has ended since the last call."""
        done = []
        while self._done:
            one = self._done.popleft()
            if one.was_read:
                self.reading -= 1
            else:
                self.writing -= 1
            done.append(one)
        return done


def _run(queue: SimpleQueue[Callable[[], None]]) -> None:
    while True:
        try:
            queue.get()()
        except Exception:  # the thread goes on: all that waits in its queue would wait for ever
            _LOG.exception("a task of the keeper's disk failed")
