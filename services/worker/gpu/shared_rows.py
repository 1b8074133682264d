"""Which decoding slots read the same blocks at the beginning of their contexts.

A system prompt, or the choices of one request: their block tables begin with the same blocks, and
attention can read those once a step. One group is looked for, that of the most common first
block, because one prompt in common is what happens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.services.worker.slots import IntArray, SlotTable

LEAST_ROWS = 8
LEAST_SAVED = 32_768
"""Positions that need not be read again, over all rows, from which on it pays."""
_COLUMNS = 32
"""Columns of the block tables that are compared at once; then twice as many."""


class SharedRows(NamedTuple):
    """Slots whose first ``positions`` positions lie in the same blocks."""

    members: IntArray
    positions: int
    """A multiple of the block size, and less than each member's cached positions or as many."""


NOTHING = SharedRows(np.zeros(0, np.int64), 0)


def shared_rows(slots: SlotTable, decoding: IntArray) -> SharedRows:
    """The group among the decoding slots that is worth it, or ``NOTHING``."""
    if len(decoding) < LEAST_ROWS:
        return NOTHING
    table, size = slots.blocks.tables[0], slots.capacity.block_size
    blocks, counts = np.unique(table[decoding, 0], return_counts=True)
    if counts.max() < LEAST_ROWS:
        return NOTHING
    members = decoding[table[decoding, 0] == blocks[counts.argmax()]]
    most = int(slots.position[members].min()) // size
    if (len(members) - 1) * most * size < LEAST_SAVED:
        return NOTHING
    positions = _common_blocks(slots, members, most) * size
    saved = (len(members) - 1) * positions
    return SharedRows(members, positions) if saved >= LEAST_SAVED else NOTHING


def _common_blocks(slots: SlotTable, members: IntArray, most: int) -> int:
    """How many entries, of the first ``most``, are the same in all members' block tables."""
    table, first = slots.blocks.tables[0], slots.blocks.tables[0][members[0]]
    begin, columns = 0, _COLUMNS
    while begin < most:
        end = min(begin + columns, most)
        same = (table[members, begin:end] == first[begin:end]).all(axis=0)
        if not same.all():
            return begin + int(same.argmin())
        begin, columns = end, 2 * columns
    return most
