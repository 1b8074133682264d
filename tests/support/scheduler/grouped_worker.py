"""A worker in plain Python whose layers are in groups: each has block tables and KV of its own.

What it checks is what groups add to plans: which blocks stand where in each group's table, and that
all that a position attends to in each group is there when its step reads it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
from support.scheduler.simulated_worker import draw, mix, require, token_bytes

from penstock.protocol.wire.messages.engine import CHUNK_ATTENTION, NO_BLOCK, LayerGroup
from penstock.protocol.wire.messages.steps import SlotSampling, StepFailed, StepPlan, StepResult
from penstock.services.scheduler.limits import Limits


@dataclass
class GroupedSlot:
    tokens: list[int]
    prompt_len: int
    computed: int
    tables: list[list[int]]
    sampling: SlotSampling
    choice: int
    told: int = 0
    """Blocks that plans have appended."""
    decoding: bool = False
    began: int = -1
    """As in ``simulated_worker.Slot``; -1 tells the harness to compare nothing."""

    def append(self, blocks: list[int]) -> None:
        """Each stretch of positions has one block in each group, in their order."""
        for block in blocks:
            self.tables[self.told % len(self.tables)].append(block)
            self.told += 1


@dataclass
class GroupedWorker:
    """Executes plans one at a time."""

    limits: Limits
    epoch: int
    fail_steps: dict[int, str] = field(default_factory=dict)
    slots: dict[int, GroupedSlot] = field(default_factory=dict)
    reused: int = 0
    """Positions that new slots found computed."""

    def __post_init__(self) -> None:
        self._memory: dict[tuple[int, int], tuple[int, int]] = {}
        """(group, history) at (block, offset)."""
        self._needs_full = True

    @property
    def groups(self) -> list[LayerGroup]:
        return self.limits.layer_groups

    def execute(
        self, plan: StepPlan, whole: dict[int, list[int]]
    ) -> StepResult | StepFailed | None:
        """Run one plan; ``whole``: all tokens of new slots' sequences."""
        if self._needs_full and not plan.full:
            return None
        self._needs_full = False
        if plan.full:
            self.slots.clear()
        for number in plan.gone:
            del self.slots[number]
        for new in plan.added:
            slot = GroupedSlot(
                whole[new.slot], new.prompt_len, new.num_computed, [[] for _ in self.groups],
                msgspec.msgpack.decode(new.sampling, type=SlotSampling), new.choice,
            )  # fmt: skip
            slot.append(new.blocks)
            self.reused += new.num_computed
            self.slots[new.slot] = slot
        for number, block in zip(plan.grown[::2], plan.grown[1::2], strict=True):
            self.slots[number].append([block])
        decoding = [slot for _, slot in sorted(self.slots.items()) if slot.decoding]
        work = [(slot, slot.computed + 1) for slot in decoding]
        for chunk in plan.chunks:
            slot = self.slots[chunk.slot]
            require(chunk.start == slot.computed, "a chunk starts where another one ended")
            slot.append(chunk.blocks)
            work.append((slot, chunk.start + chunk.count))
        self._write(work)
        if plan.step in self.fail_steps:
            for slot, end in work:
                for position in range(slot.computed, end):
                    for group in range(len(self.groups)):
                        self._memory.pop(self._place(slot, group, position), None)
            self.slots.clear()
            self._needs_full = True
            return StepFailed(plan.epoch, plan.step, self.fail_steps[plan.step])
        self._read(work)
        rows = decoding + [self.slots[chunk.slot] for chunk in plan.chunks if chunk.sample]
        tokens = [self._sample(slot) for slot in rows]
        return StepResult(plan.epoch, plan.step, token_bytes(tokens), [], 0.001)

    def _place(self, slot: GroupedSlot, group: int, position: int) -> tuple[int, int]:
        size = self.limits.block_size
        block = slot.tables[group][position // size]
        require(block != NO_BLOCK, f"position {position} has no block in group {group}")
        return block, position % size

    def _write(self, work: list[tuple[GroupedSlot, int]]) -> None:
        written: dict[tuple[int, int], GroupedSlot] = {}
        for slot, end in work:
            history = 0
            for position in range(end):
                history = mix(history, slot.tokens[position])
                if position >= slot.computed:
                    for group in range(len(self.groups)):
                        place = self._place(slot, group, position)
                        require(place not in written, f"{place} is written twice")
                        written[place] = slot
                        self._memory[place] = (group, history)

    def _read(self, work: list[tuple[GroupedSlot, int]]) -> None:
        """All that the positions of this step attend to."""
        for slot, end in work:
            history, histories = 0, list[int]()
            for token in slot.tokens[:end]:
                history = mix(history, token)
                histories.append(history)
            for group, spec in enumerate(self.groups):
                first = max(0, slot.computed - spec.window + 1) if spec.window else 0
                if spec.kind == CHUNK_ATTENTION:
                    first = slot.computed - slot.computed % spec.window
                for position in range(first, end):
                    content = self._memory.get(self._place(slot, group, position))
                    require(content == (group, histories[position]), "K and V of something else")
            slot.computed = end

    def _sample(self, slot: GroupedSlot) -> int:
        history = 0
        for token in slot.tokens:
            history = mix(history, token)
        position = len(slot.tokens) - slot.prompt_len
        token = draw(history, slot.sampling, slot.choice, position, self.limits.vocab_size)
        slot.tokens.append(token)
        slot.decoding = True
        return token
