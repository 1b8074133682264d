"""What holds blocks behind the shared memory."""

from __future__ import annotations

from typing import NamedTuple, Protocol


class BlockName(NamedTuple):
    space: bytes
    key: bytes


class KVTier(Protocol):
    """Another place for blocks: a disk, an object store, another host's keeper.

    ``has`` is asked in the keeper's own thread and must not wait for anything; ``get`` and ``put``
    are called from threads of their own, several at a time.
    """

    def has(self, name: BlockName) -> bool:
        """Whether the block can probably be had."""

    def get(self, name: BlockName, into: memoryview) -> bool:
        """Fill a slot with a block and its header. ``False``: it is not there, or not whole."""

    def put(self, name: BlockName, block: memoryview) -> bool:
        """Keep a slot's content. Returns whether it does."""
