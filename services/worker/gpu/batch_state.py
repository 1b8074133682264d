"""The batch on the device, and the few numbers of it that a step changes.

One int32 array holds block tables, positions, last tokens, sampling state and the lists of rows.
The kernels advance what follows from a step by itself (last token, position, number of outputs);
what a plan changes is gathered here as (place, value) pairs, sent in one copy, and written by one
kernel. A step that changes nothing sends nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from penstock.kernels.draw_keys import draw_bases
from penstock.kernels.gpu.slots import scatter
from penstock.services.worker.gpu.asked_columns import (
    ASKED_NUMBERS,
    ASKED_SHARES,
    asked_columns,
)
from penstock.services.worker.gpu.shared_rows import SharedRows, shared_rows
from penstock.services.worker.memory import MOST_MICRO_BATCHES
from penstock.services.worker.slots import IntArray, PlannedStep, SlotTable

_ALIGNMENT = 32
"""Arrays begin at multiples of this many numbers: kernels read 16 bytes at once."""
_FIRST_CHANGES = 16_384
RING = MOST_MICRO_BATCHES + 2
"""Host buffers in turn, for the steps that are computed, one that waits and one that is read: each
is written again only when the step that used it is over."""


def _padded(count: int, unit: int = _ALIGNMENT) -> int:
    return -(-count // unit) * unit


def _sizes(entries: int, slots: int) -> dict[str, int]:
    """Numbers of each array, in their order. entries: of all block tables."""
    of_slots = (
        "last_token", "position", "num_output", "seed_low", "seed_high", "rows", "sample_index",
        "sample_slots", "shared_length", *ASKED_NUMBERS, *ASKED_SHARES,
    )  # fmt: skip
    sizes = {"tables": entries} | dict.fromkeys(of_slots, slots)
    return sizes | {"shared_slot": 1, "unread": 1}


def _places(sizes: Mapping[str, int]) -> tuple[dict[str, int], int]:
    """Where each array begins in the one, and how long that is."""
    ends = np.cumsum([_padded(size) for size in sizes.values()]).tolist()
    return dict(zip(sizes, [0, *ends[:-1]], strict=True)), ends[-1]


def _padding_of_lists(slots: int) -> dict[str, IntArray]:
    """What follows each list: a logits row that is no one's is made from the row at its place, so
    that nothing is moved for it."""
    nothing = np.full(slots, -1, np.int64)
    return {"rows": nothing, "sample_slots": nothing, "sample_index": np.arange(slots)}


class Changes:
    """Numbers of an array on the device that a step changes: gathered, and sent in one copy."""

    def __init__(self, array: Tensor) -> None:
        self._array, self._pinned = array, array.is_cuda
        self._places: list[IntArray] = []
        self._values: list[IntArray] = []
        self._ring = [self._host_buffer(_FIRST_CHANGES) for _ in range(RING)]
        self._device = torch.empty(_FIRST_CHANGES, dtype=torch.int32, device=array.device)

    def _host_buffer(self, count: int) -> Tensor:
        return torch.empty(count, dtype=torch.int32, pin_memory=self._pinned)

    def add(self, places: IntArray, values: IntArray) -> None:
        """places: in the array, each once in a step; values: as many, unsigned words as such."""
        self._places.append(places)
        self._values.append(values)

    def clear(self) -> None:
        """A step begins."""
        self._places.clear()
        self._values.clear()

    def send(self, ring: int) -> None:
        """Write what the step has added. ring: which host buffer is free."""
        if not self._places:
            return
        count = sum(map(len, self._places))
        if 2 * count > len(self._ring[ring]):
            self._ring[ring] = self._host_buffer(4 * count)
        if 2 * count > len(self._device):
            self._device = torch.empty(4 * count, dtype=torch.int32, device=self._array.device)
        host = self._ring[ring]
        packed = host.numpy()
        packed[:count] = np.concatenate(self._places)
        packed[count : 2 * count] = np.concatenate(self._values)  # unsigned words keep their bits
        self._device[: 2 * count].copy_(host[: 2 * count], non_blocking=True)
        scatter(self._array, self._device, count)

    def warm_up(self, place: int) -> None:
        """Run the kernel that writes changes, on the number at a place that nothing reads."""
        self._device[0] = place
        scatter(self._array, self._device, 1)


class BatchState:
    """Device arrays, each a view of one; see the attributes. Lists of slots end with -1."""

    def __init__(self, slots: SlotTable, device: torch.device) -> None:
        self._groups = len(slots.blocks.tables)
        count, width = slots.blocks.tables[0].shape
        self._slots = slots
        self._width = _padded(width, 4)
        sizes = _sizes(self._groups * count * self._width, count)
        self._places, total = _places(sizes)
        self._array = torch.zeros(total, dtype=torch.int32, device=device)

        def view(name: str) -> Tensor:
            place = self._places[name]
            return self._array[place : place + sizes[name]]

        self.all_tables = view("tables").view(self._groups, count, self._width)
        self.tables = list(self.all_tables)
        """For each group of layers [slots, W]: KV blocks, as numbers of pages ahead of each."""
        self.pages = 1
        """Of a block: see ``kv_pool``."""
        self.last_token = view("last_token")
        self.position = view("position")
        """Where each slot's next token goes."""
        self.num_output = view("num_output")
        self.seed_low, self.seed_high = view("seed_low"), view("seed_high")
        self.asked = {name: view(name) for name in ASKED_NUMBERS}
        self.asked |= {name: view(name).view(torch.float32) for name in ASKED_SHARES}
        """What the sampler is asked for, columns of ``SamplerSlots`` by name."""
        self.temperature = self.asked["temperature"]
        self.rows = view("rows")
        """Slot of each decode row."""
        self.sample_index = view("sample_index")
        """Row of the step that each logits row is made from."""
        self.sample_slots = view("sample_slots")
        """Slot that each logits row's token belongs to."""
        self.shared_slot, self.shared_length = view("shared_slot"), view("shared_length")
        """See ``penstock.kernels.gpu.shared_prefix.SharedPrefix``."""
        self.finds_shared = True
        """Whether it looks for a prefix that rows share: only where a kernel can read it once."""
        self.is_shared = False
        """Whether the last step's rows share a prefix that is worth a pass of its own."""
        self.shared_slot.fill_(-1)
        self._padding = _padding_of_lists(count)
        self._lists = {name: padding.copy() for name, padding in self._padding.items()}
        for name, padding in self._padding.items():
            view(name).copy_(torch.from_numpy(padding))
        self._changes = Changes(self._array)
        self._decoding: IntArray | None = None
        self._sampled: IntArray | None = None
        self._compared: IntArray | None = None
        self._shared = np.append(np.zeros(count, np.int64), -1)
        """``shared_length``, then ``shared_slot``, as the device has them."""

    def forget(self) -> None:
        """The device's lists may be anything: the next step sends them whole."""
        self._decoding = self._sampled = self._compared = None
        self._shared.fill(-2)
        for current in self._lists.values():
            current.fill(-2)

    def warm_up(self) -> None:
        """Run the kernel that writes changes, on a number that nothing reads."""
        self._changes.warm_up(self._places["unread"])

    def update(self, step: PlannedStep, sample_rows: IntArray, ring: int) -> None:
        """Send what a planned step changes.

        sample_rows: the step's row of each entry of ``step.sampled``, and of further rows that
        logits are wanted of; ring: which host buffer, 0 … ``RING`` - 1, is free.
        """
        self._changes.clear()
        self._add_slots(step)
        for slot, first, blocks in self._slots.blocks.appended:
            self._add_blocks(slot, first, np.array(blocks, np.int64))
        if step.decoding is not self._decoding:
            self._decoding = step.decoding
            self._change_list("rows", step.decoding)
        if step.sampled is not self._sampled:
            self._sampled = step.sampled
            self._change_list("sample_slots", step.sampled)
            self._change_list("sample_index", sample_rows)
        if self.finds_shared and step.decoding is not self._compared and not step.chunks:
            self._compared = step.decoding
            self._change_shared(shared_rows(self._slots, step.decoding))
        self._changes.send(ring)

    def _add_blocks(self, slot: int, first: int, blocks: IntArray) -> None:
        """Entries of a slot's tables from ``first`` on, one of each group for each stretch."""
        for group in range(self._groups):
            begin = (group * len(self.rows) + slot) * self._width + first
            one = blocks[group :: self._groups]
            # What is not there is not read.
            self._changes.add(np.arange(begin, begin + len(one)), self.pages * np.maximum(one, 0))

    def _add_slots(self, step: PlannedStep) -> None:
        slots = self._slots
        if slots.added:
            added = np.array(slots.added, np.int64)
            bases = draw_bases(slots.seed[added], slots.choice[added])
            for name, column in (
                ("num_output", slots.num_output[added].astype(np.int64)),
                *asked_columns(slots, added),
                ("seed_low", (bases & np.uint64(0xFFFFFFFF)).astype(np.int64)),
                ("seed_high", (bases >> np.uint64(32)).astype(np.int64)),
            ):
                self._changes.add(self._places[name] + added, column)
        begun = step.sampled[len(step.decoding) :]
        if len(begun) and step.drafts is None:
            # The kernel that commits the token makes it the position after the prompt.
            self._changes.add(self._places["position"] + begun, slots.position[begun] - 1)

    def _change_list(self, name: str, wanted: IntArray) -> None:
        """Make a device list ``wanted``, followed by padding; only what differs is sent."""
        current = self._lists[name]
        target = self._padding[name].copy()
        target[: len(wanted)] = wanted
        differs = np.flatnonzero(target != current)
        if len(differs):
            self._changes.add(self._places[name] + differs, target[differs])
            self._lists[name] = target

    def _change_shared(self, found: SharedRows) -> None:
        """Make ``found`` what the device knows as shared."""
        self.is_shared = found.positions > 0
        if not self.is_shared:
            return  # nothing reads it
        target = np.zeros_like(self._shared)
        target[found.members] = found.positions
        target[-1] = found.members[0]
        differs = np.flatnonzero(target != self._shared)
        if len(differs):
            last = len(target) - 1
            places = np.where(
                differs == last,
                self._places["shared_slot"],
                self._places["shared_length"] + differs,
            )
            self._changes.add(places, target[differs])
            self._shared = target
