"""Which KV blocks are copied to the keeper, and when.

A block is wanted there when a second prompt has had it (or the first one, by setting), and when its
sequence was preempted. It is copied once the step that completes it is answered, a few blocks at a
time; if its place is needed before that, at once: the copy is made ahead of the step that
overwrites it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import filterfalse
from typing import NamedTuple

from penstock.services.scheduler.block_manager import BlockManager
from penstock.services.scheduler.in_flight import StepsInFlight

MOST_SEEN = 1 << 18
"""Names that were seen once are remembered for as long as so many others come."""
MOST_WANTED = 1 << 16
LOST_TICKS = 240
"""A copy that is not answered for so many ticks, a minute, is lost."""


class KeptBlocks(NamedTuple):
    """What a worker says of its blocks; see ``Attached``."""

    space: bytes
    slot_bytes: int
    piece_bytes: int = 0


@dataclass(slots=True)
class Storing:
    """Blocks on their way to the keeper."""

    slots: dict[bytes, int]
    """By their names, in order."""
    count: int
    """Of them when the copies began."""
    urgent: bool
    """They are about to be overwritten."""
    ticks: int = 0
    """Since the worker was told."""
    bad: set[bytes] = field(default_factory=set)
    """Names whose content may be wrong, as was found since."""


class StoresUnderWay(dict[int, Storing]):
    """Copies that are not answered, by number."""

    @property
    def in_time(self) -> int:
        """Those that there is time for."""
        return sum(not one.urgent for one in self.values())

    @property
    def urgent_blocks(self) -> int:
        return sum(one.count for one in self.values() if one.urgent)

    def has(self, name: bytes) -> bool:
        return any(name in one.slots for one in self.values())

    def distrust(self, names: list[bytes]) -> None:
        """Content under these names may be wrong."""
        for one in self.values():
            one.bad |= set(names).intersection(one.slots)

    def tick(self) -> list[int]:
        """Which are lost."""
        for one in self.values():
            one.ticks += 1
        return [number for number, one in self.items() if one.ticks > LOST_TICKS]


class StoreQueue:
    """What is to be copied."""

    def __init__(self, blocks: BlockManager, in_flight: StepsInFlight, after: int) -> None:
        """``after``: prompts that a block must have been part of."""
        self.known: set[bytes] = set()
        """What the keeper has, or is being given."""
        self._blocks, self._in_flight, self._after = blocks, in_flight, after
        self._seen: set[bytes] = set()
        self._seen_before: set[bytes] = set()
        self._wanted: OrderedDict[bytes, None] = OrderedDict()
        """Names of what is to be copied, in the order in which it was wanted."""
        self.urgent: list[tuple[bytes, int]] = []
        """Wanted blocks (name, block) that are about to be overwritten."""
        self.room = 0
        """How many more can be copied now."""
        self.most_urgent = 0
        """How many may be copied ahead of a step …"""
        self.sharing: StoresUnderWay | None = None
        """… with those of earlier steps that still are, where copies run beside steps."""
        self.missed = 0
        """Wanted blocks that were not copied because there was no room."""

    def __len__(self) -> int:
        return len(self._wanted)

    def __contains__(self, name: bytes) -> bool:
        return name in self._wanted

    def follow(self) -> None:
        """Hear of blocks from now on."""
        self._blocks.on_named, self._blocks.on_reused = self._named, self._reused

    def stop(self) -> None:
        """Nothing can be copied until ``follow``; what was wanted is forgotten."""
        self._blocks.on_named = self._blocks.on_reused = None
        self.room = 0
        self.clear()

    def _named(self, name: bytes, block: int) -> None:
        if name in self.known:
            return
        if self._after <= 1 or name in self._seen or name in self._seen_before:
            self._want(name)
            return
        self._seen.add(name)
        if len(self._seen) > MOST_SEEN:
            self._seen, self._seen_before = set(), self._seen

    def _reused(self, name: bytes, block: int) -> None:
        if name not in self._wanted:
            return
        del self._wanted[name]
        if self._blocks.completed_by(block) > self._answered:
            return
        under_way = 0 if self.sharing is None else self.sharing.urgent_blocks
        if len(self.urgent) < min(self.room, self.most_urgent - under_way):
            self.urgent.append((name, block))
        else:
            self.missed += 1

    def want(self, names: Iterable[bytes]) -> None:
        """These are worth keeping, if they are computed."""
        for name in filterfalse(self.known.__contains__, names):
            self._want(name)

    def _want(self, name: bytes) -> None:
        if name not in self._wanted and len(self._wanted) < MOST_WANTED:
            self._wanted[name] = None

    def forget(self, names: list[bytes]) -> None:
        """These must not be copied."""
        for name in names:
            self._wanted.pop(name, None)
        bad = set(names)
        self.urgent = [one for one in self.urgent if one[0] not in bad]

    def take_urgent(self) -> list[tuple[bytes, int]]:
        """What must be copied before anything else is, as far as there is room."""
        taken, self.urgent = self.urgent[: self.room], []
        return taken

    @property
    def _answered(self) -> int:
        """The last step that is answered."""
        steps = self._in_flight.steps
        return steps[0].number - 1 if steps else self._in_flight.last

    def take(self, most: int) -> list[tuple[bytes, int]]:
        """The next blocks to copy, as (name, block): each is whole."""
        found: list[tuple[bytes, int]] = []
        answered, wanted = self._answered, self._wanted
        while wanted and len(found) < most:
            name = next(iter(wanted))
            block = self._blocks.find(name)
            if block is not None:
                if self._blocks.completed_by(block) > answered:
                    break  # those behind it were planned with it or later
                found.append((name, block))
            del wanted[name]
        return found

    def clear(self) -> None:
        """KV memory is empty."""
        self._wanted.clear()
        self.urgent.clear()
