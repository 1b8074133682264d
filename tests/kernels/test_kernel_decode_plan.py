"""How a decode step's attention is cut over programs, on the interpreter or a GPU."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import triton
from support.kernels.triton_device import DEVICE

from penstock.kernels.gpu.decode_plan import FIELDS, PROGRAMS_EACH, plan_kernel

MOST = 528 if torch.cuda.is_available() else 132
"""Programs; the interpreter takes milliseconds for each."""
Item = tuple[int, int, int]
"""Row, KV head, tile. Padding, of no length, has none."""


def items_of(own: list[int | None], kv_heads: int, keys: int) -> list[Item]:
    return [
        (row, head, tile)
        for row, length in enumerate(own)
        for head in range(kv_heads)
        for tile in range(0 if length is None else max(1, -(-length // keys)))
    ]


def check(cached: list[int | None], shared: list[int], prefixed: bool, programs: int) -> None:
    """Plan for rows of which the first positions, so many of each, are shared."""
    kv_heads, keys = 3, 32
    slots = random.Random(2).sample(range(50), len(cached))
    slots = [-1 if length is None else slot for slot, length in zip(slots, cached, strict=True)]
    position, lengths = [999] * 50, [32] * 50
    for slot, length, common in zip(slots, cached, shared, strict=True):
        if length is not None:
            position[slot], lengths[slot] = length, common
    # Behind the step's rows stands what is not to be read.
    rows, positions, prefix = (
        torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
        for numbers in ([*slots, 49, 48], position, lengths)
    )
    plan = torch.full((programs, FIELDS), -7, dtype=torch.int32, device=DEVICE)
    plan_kernel[(triton.cdiv(programs, PROGRAMS_EACH),)](
        rows, positions, prefix if any(shared) else None, plan, len(cached), int(prefixed),
        programs, kv_heads, keys, 32, PROGRAMS_EACH,
    )  # fmt: skip
    own = [
        None if length is None else length - common * prefixed
        for length, common in zip(cached, shared, strict=True)
    ]
    items = items_of(own, kv_heads, keys)
    each, longer = divmod(len(items), programs)
    begin = 0
    for program, record in enumerate(plan.tolist()):
        count = each + (program < longer)
        assert record[3:6] == [count, each, longer]
        if count:
            row = items[begin][0]
            assert tuple(record[:3]) == items[begin]
            assert record[6:] == [slots[row], cached[row] or 0]
        begin += count
    assert begin == len(items)


CACHED: list[list[int | None]] = [
    [0],
    [None],
    [1000],
    [33, 32, 31, 0, 700, None, None],
    [*random.Random(1).choices(range(300), k=32)],
]


@pytest.mark.parametrize(
    ("cached", "programs"),
    [
        *itertools.product(CACHED, [7, 33]),
        *((cached, MOST) for cached in (CACHED[0], CACHED[-1])),
        *(pytest.param(cached, MOST, marks=pytest.mark.slow) for cached in CACHED[1:-1]),
    ],
    ids=str,
)
def test_every_item_is_in_one_split_and_splits_are_even(
    cached: list[int | None], programs: int
) -> None:
    check(cached, [0] * len(cached), False, programs)


@pytest.mark.parametrize("programs", [7, MOST])
@pytest.mark.parametrize(
    ("cached", "shared"),
    [
        ([64], [64]),
        ([2049, 2080, 2081, 2048, 90, 2148, None], [2048, 2048, 2048, 2048, 0, 2048, 0]),
        ([208, 239, 240, 241, 0, 300, 31, None, None], [208, 208, 208, 208, 0, 0, 0, 0, 0]),
    ],
    ids=str,
)
def test_shared_positions_have_no_items(
    cached: list[int | None], shared: list[int], programs: int
) -> None:
    check(cached, shared, True, programs)


def test_a_step_without_the_prefix_has_items_for_all_positions() -> None:
    check([200, 300, 33], [96, 96, 0], False, 33)
