"""Which decoding slots share the beginning of their contexts."""

from __future__ import annotations

import random

import numpy as np
import pytest

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.gpu.shared_rows import LEAST_ROWS, LEAST_SAVED, shared_rows
from penstock.services.worker.slots import SlotTable

SIZE = 16


def table(contexts: list[tuple[int, int]], common: int) -> SlotTable:
    """Slots with (positions, blocks of the common prefix); all other blocks are their own."""
    slots = SlotTable(EngineSizes(1 << 20, SIZE, len(contexts), 512, 1 << 14, 100))
    fresh = common
    for slot, (positions, shared) in enumerate(contexts):
        count = -(-(positions + 1) // SIZE)
        own = list(range(fresh, fresh + count))
        fresh += count
        slots.blocks.tables[0][slot, :count] = [*range(shared), *own][:count]
        slots.position[slot] = positions
    return slots


def found(slots: SlotTable, rows: int) -> tuple[list[int], int]:
    shared = shared_rows(slots, np.arange(rows))
    return shared.members.tolist(), shared.positions


@pytest.mark.parametrize("blocks", [31, 32, 33, 100, 256])
def test_the_longest_common_beginning_is_found(blocks: int) -> None:
    rows = 2 + LEAST_SAVED // (blocks * SIZE)
    rows = max(rows, LEAST_ROWS)
    slots = table([(blocks * SIZE + 5 + row, blocks) for row in range(rows)], blocks)
    assert found(slots, rows) == (list(range(rows)), blocks * SIZE)


def test_no_more_is_shared_than_every_member_has_cached() -> None:
    slots = table([(200 * SIZE, 250), (100 * SIZE + 3, 250), *[(180 * SIZE, 250)] * 60], 250)
    assert found(slots, 62) == (list(range(62)), 100 * SIZE)


def test_rows_with_other_beginnings_are_left_out() -> None:
    draw = random.Random(1)
    contexts = [(3000, 128 if draw.random() < 0.5 else 0) for _ in range(100)]
    members = [row for row, (_, shared) in enumerate(contexts) if shared]
    assert found(table(contexts, 128), 100) == (members, 128 * SIZE)


@pytest.mark.parametrize(
    "contexts",
    [
        [(3000, 128)] * (LEAST_ROWS - 1),
        [(3000, 0)] * 100,
        [(40, 2)] * 200,
        [],
    ],
    ids=["few rows", "nothing common", "too short", "nobody"],
)
def test_what_does_not_pay_is_nothing(contexts: list[tuple[int, int]]) -> None:
    slots = table(contexts or [(1, 0)], 128)
    assert found(slots, len(contexts)) == ([], 0)
