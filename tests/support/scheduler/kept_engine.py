"""An engine for tests whose blocks are kept by a keeper, which lives in the test's own process."""

from __future__ import annotations

from typing import Any

from support.scheduler.scheduler_harness import Engine

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    KVCopied,
    KVCopies,
    KVForget,
    TierDrop,
    TierGet,
    TierGot,
    TierKeys,
    TierLent,
    TierOpened,
    TierStored,
    joined,
    split,
)
from penstock.protocol.wire.messages.steps import StepPlan
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.tier_stores import KeptBlocks

SPACE = b"s" * 16
LENT = 64


class Keeper:
    """Blocks by their keys, as content of slots; there is always room."""

    def __init__(self) -> None:
        self.slots: dict[int, tuple[bytes, Any]] = {}
        self.by_key: dict[bytes, int] = {}
        self.next_slot = 0
        self.before: dict[int, int] = {}
        """What the simulated worker knows of contents."""

    def lend(self, count: int) -> list[int]:
        self.next_slot += count
        return list(range(self.next_slot - count, self.next_slot))

    def answer(self, message: Message) -> Message | None:
        match message:
            case TierStored():
                self.by_key |= dict(zip(split(message.keys), message.slots, strict=True))
                return TierLent(self.lend(len(message.slots) + len(message.unused)))
            case TierDrop():
                for key in split(message.keys):
                    self.by_key.pop(key, None)
            case TierGet():
                slots = []
                for key in split(message.keys):
                    if key not in self.by_key:
                        break
                    slots.append(self.by_key[key])
                return TierGot(message.number, slots)
        return None


class KeptEngine(Engine):
    """Copies are made in their turn, the keeper's answers come before the next plan. Where copies
    run beside steps (``piece_bytes``), loads are made as late as they are answered, and stores are
    answered before the next plan but one."""

    def __init__(
        self, limits: Limits, keeper: Keeper, after: int = 2, piece_bytes: int = 0, **more: Any
    ) -> None:
        super().__init__(limits, **more)
        self.keeper = keeper
        self.tier = self.core.keep_blocks(KeptBlocks(SPACE, 64, piece_bytes), after, "scheduler")
        self.copies: list[KVCopies] = []
        self.under_way: dict[int, KVCopies] = {}
        """Loads that run beside steps, by number."""
        self.answers_late: list[Message] = []
        self.stored: list[KVCopied] = []
        """Stores beside steps, before they are answered."""
        self.parts = 0
        """The keeper tells of so many blocks at a time; 0: of all."""
        self.silent = False
        """Neither keeper nor worker answers about blocks."""
        self.worker_silent = False
        """What is to be copied gets lost."""
        self.keeper_gone = False
        """The worker finds no memory of the keeper."""
        self.open()
        planned = self.core.plan

        def plan(now: float) -> StepPlan | None:
            made = planned(now)
            self._carry_out()
            return made

        setattr(self.core, "plan", plan)  # noqa: B010 - copies go ahead of a plan's execution

    def open(self) -> None:
        """A keeper, perhaps another one, answers."""
        self.worker._before.update(self.keeper.before)
        self.keeper.before = self.worker._before
        self.tier.take(TierOpened(SPACE, "pool", 1000, self.keeper.lend(LENT)), self.now)
        self.tier.take(TierKeys(SPACE, joined(list(self.keeper.by_key))), self.now)

    def plan(self) -> StepPlan | None:
        self.answers_late += self.stored
        self.stored.clear()
        while self.under_way and not self.silent:
            self.answers_late.append(self._made(self.under_way.popitem()[1]))
        while self.answers_late and not self.silent:
            self.tier.take(self.answers_late.pop(0), self.now)
            self.core.check()
            self._carry_out()
        return super().plan()

    def restart(self, limits: Limits | None = None) -> None:
        super().restart(limits)
        self.under_way.clear()
        self.stored.clear()
        self.worker._before = self.keeper.before

    def _carry_out(self) -> None:
        for copies in self.tier.to_worker:
            if isinstance(copies, KVForget):
                self.under_way.pop(copies.number, None)
                continue
            self.copies.append(copies)
            if not self.worker_silent and (answer := self._copied(copies)) is not None:
                self.answers_late.append(answer)
        self.tier.to_worker.clear()
        for message in self.tier.to_keeper:
            if (answer := self.keeper.answer(message)) is not None:
                self.answers_late += self._in_parts(answer)
        self.tier.to_keeper.clear()

    def _in_parts(self, answer: Message) -> list[Message]:
        if not isinstance(answer, TierGot) or not self.parts:
            return [answer]
        told: list[Message] = []
        for begin in range(0, max(1, len(answer.slots)), self.parts):
            end = begin + self.parts
            more = end < len(answer.slots)
            told.append(TierGot(answer.number, answer.slots[begin:end], more))
        return told

    def _copied(self, copies: KVCopies) -> KVCopied | None:
        """``None``: it is answered later."""
        if self.keeper_gone:
            return KVCopied(copies.epoch, copies.number, 0, 0.0, failure="FileNotFoundError")
        if copies.epoch != self.worker.epoch or copies.after != self.worker._expected - 1:
            return KVCopied(copies.epoch, copies.number, 0, 0.0)
        if self.tier.piece_bytes and not copies.store:
            self.under_way[copies.number] = copies
            return None
        made = self._made(copies)
        if self.tier.piece_bytes:
            self.stored.append(made)
            return None
        return made

    def _made(self, copies: KVCopies) -> KVCopied:
        memory, done = self.worker._memory, 0
        for block, slot, key in zip(copies.blocks, copies.slots, split(copies.keys), strict=True):
            if copies.store:
                assert None not in memory[block], "a block is stored before it is computed"
                self.keeper.slots[slot] = key, list(memory[block])
            else:
                found, content = self.keeper.slots[slot]
                if found != key:
                    return KVCopied(copies.epoch, copies.number, done, 0.001, corrupted=True)
                memory[block] = list(content)
            done += 1
        return KVCopied(copies.epoch, copies.number, done, 0.001)
