"""Which KV blocks each slot has: a table for each group of layers, kept as plans say.

The tables of a slot have one length: plans name, for each stretch of ``block_size`` positions, one
block of each group. What lies wholly ahead of a group's window is forgotten here before it may
belong to someone else: nothing of it is seen, but a weight of 0 times a NaN would still be NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from penstock.protocol.wire.messages.engine import (
    CHUNK_ATTENTION,
    NO_BLOCK,
    EngineSizes,
    LayerGroup,
)

IntArray = npt.NDArray[np.int64]


class PlanError(ValueError):
    """A plan that cannot be executed: it contradicts the slots or the executor's capacity."""


class BlockTables:
    """The tables of one executor."""

    def __init__(self, capacity: EngineSizes, multiple: int, empty_block: int) -> None:
        """``multiple``: tables are this many entries wide, or a multiple of it; ``empty_block``:
        what stands in the entries that have no block."""
        self.groups: Sequence[LayerGroup] = capacity.groups or [LayerGroup()]
        self._capacity, self._empty = capacity, empty_block
        self._longest = -(-capacity.max_model_len // capacity.block_size)
        width = -(-self._longest // multiple) * multiple
        slots = capacity.max_num_seqs
        self.tables = [np.full((slots, width), empty_block, np.int64) for _ in self.groups]
        """For each group [slots, width]."""
        self.length = np.zeros(slots, np.int64)
        """Entries of each slot's tables."""
        self.fresh: list[int] = []
        """Blocks handed out since ``begin`` of which no position is computed yet."""
        self.appended: list[tuple[int, int, list[int]]] = []
        """What was appended since ``begin``: slot, first entry, blocks of all groups."""
        self._windows = [
            (table, group)
            for table, group in zip(self.tables, self.groups, strict=True)
            if group.window
        ]

    def begin(self) -> None:
        """A plan follows."""
        self.fresh, self.appended = [], []

    def clear(self, slot: int) -> None:
        self.length[slot] = 0
        for table in self.tables:
            table[slot] = self._empty

    def append(self, slot: int, blocks: list[int], computed: int = 0) -> None:
        """``computed``: the first so many entries hold computed positions. Raises ``PlanError``."""
        if not blocks:
            return
        limit, count = self._capacity.num_blocks, len(self.tables)
        least = NO_BLOCK if self._windows else 0
        if min(blocks) < least or max(blocks) >= limit:
            raise PlanError(f"slot {slot}: blocks {min(blocks)} … {max(blocks)} of 0 … {limit - 1}")
        if len(blocks) % count:
            raise PlanError(f"slot {slot}: {len(blocks)} blocks for {count} groups of layers")
        first = int(self.length[slot])
        end = first + len(blocks) // count
        if end > self._longest:
            raise PlanError(
                f"slot {slot}: {end} blocks; a sequence of max_model_len "
                f"{self._capacity.max_model_len} has {self._longest}"
            )
        for number, table in enumerate(self.tables):
            table[slot, first:end] = blocks[number::count]
        fresh = blocks[computed * count :]
        if self._windows and min(blocks) == NO_BLOCK:
            for table in self.tables:
                table[slot, first:end][table[slot, first:end] == NO_BLOCK] = self._empty
            fresh = [block for block in fresh if block != NO_BLOCK]
        self.length[slot] = end
        self.fresh += fresh
        self.appended.append((slot, first, blocks))

    def grow(self, grown: list[int]) -> None:
        """Flat pairs (slot, block), of several groups one after another. Raises ``PlanError``."""
        step = 2 * len(self.tables)
        if len(grown) % step:
            raise PlanError(f"grown holds pairs (slot, block), got {len(grown)} numbers")
        for at in range(0, len(grown), step):
            part = grown[at : at + step]
            if any(slot != part[0] for slot in part[::2]):
                raise PlanError(f"slot {part[0]}: grown has no block for each group of layers")
            self.append(part[0], part[1::2])

    def forget_behind(self, slot: int, position: int) -> None:
        """Nothing ahead of the windows of this position is attended to any more."""
        size = self._capacity.block_size
        for table, group in self._windows:
            table[slot, : group.blocks_behind(position, size)] = self._empty

    @property
    def has_windows(self) -> bool:
        """Whether layers forget what lies far behind."""
        return bool(self._windows)

    def forget_behind_all(self, slots: IntArray, positions: IntArray) -> None:
        """``forget_behind`` for each of these slots."""
        for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
            self.forget_behind(slot, position)

    def step_windows(self, slots: IntArray, positions: IntArray) -> None:
        """As ``forget_behind``, for slots that each went on by one position at most."""
        for table, group in self._windows:
            if group.kind == CHUNK_ATTENTION:
                for slot, position in zip(slots.tolist(), positions.tolist(), strict=True):
                    if position % group.window == 0:  # a whole chunk lies behind at once
                        gone = group.blocks_behind(position, self._capacity.block_size)
                        table[slot, :gone] = self._empty
                continue
            behind = np.maximum(positions - group.window + 1, 0) // self._capacity.block_size
            left = behind > 0
            table[slots[left], behind[left] - 1] = self._empty
