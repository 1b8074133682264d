"""How a decode step's attention is cut over programs, on the interpreter or a GPU."""

from __future__ import annotations

import random

import pytest
import torch
import triton
from triton_device import DEVICE

from penstock.kernels.gpu.decode_plan import FIELDS, PROGRAMS_EACH, plan_kernel

Item = tuple[int, int, int]
"""Row, KV head, tile. Padding, of no length, has none."""


def items_of(cached: list[int | None], kv_heads: int, keys: int) -> list[Item]:
    return [
        (row, head, tile)
        for row, length in enumerate(cached)
        for head in range(kv_heads)
        for tile in range(0 if length is None else max(1, -(-length // keys)))
    ]


@pytest.mark.parametrize("programs", [7, 33, 528])
@pytest.mark.parametrize(
    "cached",
    [
        [0],
        [None],
        [1000],
        [33, 32, 31, 0, 700, None, None],
        random.Random(1).choices(range(300), k=32),
    ],
    ids=str,
)
def test_every_item_is_in_one_stretch_and_stretches_are_even(
    cached: list[int | None], programs: int
) -> None:
    kv_heads, keys = 3, 32
    slots = random.Random(2).sample(range(50), len(cached))
    slots = [-1 if length is None else slot for slot, length in zip(slots, cached, strict=True)]
    position = [999] * 50
    for slot, length in zip(slots, cached, strict=True):
        if length is not None:
            position[slot] = length
    # Behind the step's rows stands what is not to be read.
    rows = torch.tensor([*slots, 49, 48], dtype=torch.int32, device=DEVICE)
    plan = torch.full((programs, FIELDS), -7, dtype=torch.int32, device=DEVICE)
    plan_kernel[(triton.cdiv(programs, PROGRAMS_EACH),)](
        rows, torch.tensor(position, dtype=torch.int32, device=DEVICE), None, plan, len(cached), 0,
        kv_heads, keys, programs, 32, PROGRAMS_EACH,
    )  # fmt: skip
    items = items_of(cached, kv_heads, keys)
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
