"""What copies of KV blocks are made of: staging memory, marks on streams, groups of blocks."""

from __future__ import annotations

import threading
import time
from typing import NamedTuple

import torch
from torch import Tensor

from penstock.protocol.wire.messages.kv_tier import KVCopied, KVCopies, split
from penstock.services.worker.direct_copy import DirectCopies


class Staging(NamedTuple):
    """Room for a group of blocks."""

    device: Tensor
    """[blocks, slot bytes] uint8 of the device."""
    host: Tensor
    """[blocks, slot bytes] uint8, pinned where there is a device."""
    rows: list[memoryview]
    """The same, block by block."""


class Landing(NamedTuple):
    """Room for a group of blocks that one thread loads."""

    rows: list[memoryview]
    """The host's memory, slot by slot, pinned where there is a device."""
    contents: list[Tensor]
    """The same without headers."""
    direct: DirectCopies | None
    """``None``: torch copies."""


class Transfer:
    """What one message asks for."""

    def __init__(self, message: KVCopies, places: list[memoryview], groups: int) -> None:
        """places: the keeper's slots."""
        self.message, self.places, self.keys = message, places, split(message.keys)
        self.began = time.perf_counter()
        self.lock = threading.Lock()
        self.left = groups
        """Groups that are not over."""
        self.rank = 0
        """What is added to the blocks that are left; the least goes first."""
        self.done = len(message.blocks)
        """The first blocks that are copied, as far as is known."""
        self.corrupted = self.forgotten = False
        self.failure = ""

    def stopped_at(self, block: int, *, corrupted: bool = False, failure: str = "") -> None:
        """The block at this place cannot be copied."""
        with self.lock:
            if block < self.done:
                self.done, self.corrupted, self.failure = block, corrupted, failure

    def over(self) -> bool:
        """A group is over. Returns whether it was the last one."""
        with self.lock:
            self.left -= 1
            return not self.left

    def answer(self) -> KVCopied:
        seconds, message = time.perf_counter() - self.began, self.message
        outcome = self.corrupted, self.failure
        return KVCopied(message.epoch, message.number, self.done, seconds, *outcome)


class Mark:
    """A place on a stream; on the CPU, where all is done at once, nothing."""

    def __init__(self, on_gpu: bool) -> None:
        self._event = torch.cuda.Event(blocking=True) if on_gpu else None  # type: ignore[no-untyped-call]

    def set(self) -> None:
        """Here, on the present stream."""
        if self._event is not None:
            self._event.record()

    def precede(self) -> None:
        """Let what follows on the present stream begin behind it."""
        if self._event is not None:
            self._event.wait()

    @property
    def is_passed(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Until it is passed."""
        if self._event is not None:
            self._event.synchronize()


class Group(NamedTuple):
    """Blocks that one thread copies at a time."""

    transfer: Transfer
    start: int
    """Of the message's blocks."""
    fetched: Mark | None = None
    """When a store has its blocks in ``staging``; a load uses the thread's own."""
    staging: Staging | None = None


class Raised(NamedTuple):
    """A group that is loaded, whose copies to the device are under way."""

    group: Group
    brought: Mark | DirectCopies | None
    """``None``: nothing is copied."""
