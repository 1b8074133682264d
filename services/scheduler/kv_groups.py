"""Groups of layers that share one block table: what each keeps of a sequence, and what it needs."""

from __future__ import annotations

from collections.abc import Sequence as Ordered

from penstock.protocol.wire.messages.engine import (
    CHUNK_ATTENTION,
    FULL_ATTENTION,
    WINDOW_ATTENTION,
    LayerGroup,
)
from penstock.services.scheduler.block_manager import BlockManager

MOST_GROUPS = 8
"""Models with several kinds of attention have two or three."""
ONE_FULL = [LayerGroup()]
KINDS = (FULL_ATTENTION, WINDOW_ATTENTION, CHUNK_ATTENTION)


def check_groups(groups: Ordered[LayerGroup]) -> None:
    """Raises ``ValueError`` for groups that this scheduler cannot plan for."""
    kinds = ", ".join(group.kind for group in groups) or "none"
    if not 1 <= len(groups) <= MOST_GROUPS:
        raise ValueError(
            f"the worker has {len(groups)} groups of layers ({kinds}); the scheduler supports 1 to "
            f"{MOST_GROUPS}"
        )
    for group in groups:
        if group.kind not in KINDS:
            raise ValueError(
                f"the worker has a group of layers of the kind {group.kind!r} (of {kinds}); the "
                f"scheduler supports {', '.join(map(repr, KINDS))}"
            )
        if (group.window > 0) != (group.kind != FULL_ATTENTION):
            raise ValueError(
                f"the worker has a group of layers of the kind {group.kind!r} with a window of "
                f"{group.window} positions; {FULL_ATTENTION!r} has 0, the others 1 or more"
            )


class KVGroup:
    """The arithmetic of one group."""

    def __init__(self, spec: LayerGroup, block_size: int, most_step: int, prefix: bytes) -> None:
        """``most_step``: positions that one step computes of a sequence at most. ``prefix``: what
        the names of its blocks begin with, to tell them from those of other groups."""
        self.window = spec.window
        """Positions that each position attends to at most, its own included; 0: all before it."""
        self._spec, self._size, self._most_step = spec, block_size, most_step
        self._prefix = prefix

    def name(self, digest: bytes) -> bytes:
        """Under which a block of this group is cached."""
        return self._prefix + digest if self._prefix else digest

    def names(self, digests: list[bytes]) -> list[bytes]:
        return [self._prefix + digest for digest in digests] if self._prefix else digests

    def blocks_behind(self, position: int) -> int:
        """Blocks at the beginning of a table that nothing from this position on attends to."""
        return self._spec.blocks_behind(position, self._size)

    def needed(self, blocks: int) -> int:
        """How many blocks a table of this length holds at once, at most."""
        return self._spec.needed(blocks, self._size, self._most_step)

    def longest(self, blocks: BlockManager, digests: list[bytes], most: int) -> int:
        """Blocks of the longest prefix that the cache holds whatever of it is needed to go on;
        ``most`` at most. O(most)."""
        if not self.window:
            return len(blocks.match(self.names(digests[:most])))
        length = most
        while length > 0:
            for index in range(length - 1, self.blocks_behind(length * self._size) - 1, -1):
                if blocks.find(self.name(digests[index])) is None:
                    length = index  # no prefix that needs this block
                    break
            else:
                return length
        return 0


def make_groups(specs: Ordered[LayerGroup], block_size: int, most_step: int) -> list[KVGroup]:
    """The names of blocks of the first group without a window are the digests themselves."""
    whole = next((number for number, spec in enumerate(specs) if not spec.window), 0)
    return [
        KVGroup(spec, block_size, most_step, b"" if number == whole else bytes([number]))
        for number, spec in enumerate(specs)
    ]
