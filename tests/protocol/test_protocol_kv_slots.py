"""A block outside of an engine's memory is itself, whole, or no block at all."""

from __future__ import annotations

import random

import pytest

from penstock.protocol.kv_slots import HEADER_BYTES, holds, seal, slot_bytes

SPACE, KEY = b"s" * 16, b"k" * 16


@pytest.mark.parametrize("size", [0, 5, 100, 12_308, 600_007])
def test_a_block_whose_bits_differ_is_not_taken_for_it(size: int) -> None:
    chance = random.Random(size)
    slot = memoryview(bytearray(slot_bytes(size)))
    content = slot[HEADER_BYTES : HEADER_BYTES + size]
    content[:] = chance.randbytes(size)
    seal(slot, SPACE, KEY, size)
    assert holds(slot, SPACE, KEY)
    assert not holds(slot, SPACE, b"l" * 16)
    for place in chance.choices(range(size), k=50 if size else 0):
        content[place] ^= 1 << chance.randrange(8)
        assert not holds(slot, SPACE, KEY)
        seal(slot, SPACE, KEY, size)


def test_a_block_of_two_halves_in_the_wrong_order_is_not_taken_for_it() -> None:
    half = random.Random(0).randbytes(262_144), random.Random(1).randbytes(262_144)
    size = 2 * len(half[0])
    slot = memoryview(bytearray(slot_bytes(size)))
    slot[HEADER_BYTES : HEADER_BYTES + size] = half[0] + half[1]
    seal(slot, SPACE, KEY, size)
    slot[HEADER_BYTES : HEADER_BYTES + size] = half[1] + half[0]
    assert not holds(slot, SPACE, KEY)
