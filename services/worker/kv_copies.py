"""Copies of KV blocks between an executor's memory and the keeper's, between two steps."""

from __future__ import annotations

import mmap
import os
import time
from typing import Protocol

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.kv_slots import HEADER_BYTES, holds, open_pool, seal, slot_bytes
from penstock.protocol.wire.messages.kv_tier import KVCopied, KVCopies, split
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.worker.executor import DirectExecutor, Executor
from penstock.services.worker.kv_space import kv_space

NOT_KEPT = (
    "--kv-tier-memory-bytes and --kv-tier-disk keep blocks of models with one kind of attention on "
    "--device cpu; this one keeps no keys and values, has layers with windows beside others, or "
    "computes elsewhere: start it without them"
)


class BlockAccess(Protocol):
    """An executor's KV memory, block by block."""

    block_bytes: int
    """Of keys and values of all layers."""
    layout: str
    """What the order and the meaning of these bytes depend on."""

    def read(self, block: int, into: memoryview) -> None:
        """Fill ``into``, ``block_bytes`` long, once all steps that were launched are over."""

    def write(self, block: int, content: memoryview) -> None:
        """The opposite, ahead of all steps to come."""


class BlockCopies:
    """Carries out what the scheduler asks for. The keeper may be gone meanwhile: its memory stays
    as long as it is mapped here, and what is copied into it then is lost."""

    def __init__(self, blocks: BlockAccess, num_blocks: int, space: bytes) -> None:
        self.space, self.slot_bytes = space, slot_bytes(blocks.block_bytes)
        self._blocks, self._num_blocks = blocks, num_blocks
        self._pool = ""
        self._memory: memoryview | None = None
        self._own = memoryview(bytearray(self.slot_bytes))
        """A slot that nobody else writes into: what is sealed or checked is what is copied."""

    def answer(self, message: KVCopies, epoch: int, launched: int, expected: int) -> KVCopied:
        """Copy in turn: behind the step that was ``launched`` last, where the next one is
        ``expected``. Behind a failure or a gap the blocks may be others' by now."""
        in_turn = message.epoch == epoch and message.after == launched
        if in_turn and expected == (launched + 1 if launched else 0):
            return self.execute(message)
        return KVCopied(message.epoch, message.number, 0, 0.0)

    def execute(self, message: KVCopies) -> KVCopied:
        """Copy what can be copied; a scheduler that gets no answer would wait for it."""
        began = time.perf_counter()
        done, corrupted, failure = 0, False, ""
        keys = split(message.keys)
        try:
            memory = self._mapped(message.pool)
            for block, slot, key in zip(message.blocks, message.slots, keys, strict=True):
                place = self._place(memory, block, slot)
                if message.store:
                    self._store(block, place, key)
                elif not self._load(block, place, key):
                    corrupted = True
                    break
                done += 1
        except Exception as error:
            failure = f"{type(error).__name__}: {error}"
        seconds = time.perf_counter() - began
        return KVCopied(message.epoch, message.number, done, seconds, corrupted, failure)

    def _mapped(self, pool: str) -> memoryview:
        """Raises ``OSError`` or ``ValueError`` where the keeper is gone."""
        if self._memory is None or self._pool != pool:
            descriptor = open_pool(pool, self.slot_bytes)
            try:
                size = os.fstat(descriptor).st_size
                self._memory = memoryview(mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
            self._pool = pool
        return self._memory

    def _place(self, memory: memoryview, block: int, slot: int) -> memoryview:
        begin = slot * self.slot_bytes
        end = begin + self.slot_bytes
        if not 0 <= block < self._num_blocks or begin < 0 or end > len(memory):
            raise ValueError(f"block {block} and slot {slot} are not both there")
        return memory[begin:end]

    def _store(self, block: int, place: memoryview, key: bytes) -> None:
        own, size = self._own, self._blocks.block_bytes
        self._blocks.read(block, own[HEADER_BYTES : HEADER_BYTES + size])
        seal(own, self.space, key, size)
        place[:] = own

    def _load(self, block: int, place: memoryview, key: bytes) -> bool:
        own, size = self._own, self._blocks.block_bytes
        own[:] = place
        if not holds(own, self.space, key):
            return False
        self._blocks.write(block, own[HEADER_BYTES : HEADER_BYTES + size])
        return True


def copies_of(config: Config, executor: Executor) -> BlockCopies | None:
    """What copies the executor's blocks to the keeper and back; ``None``: nobody asks for it.

    Raises ``ConfigError`` where blocks are to be kept that cannot be copied.
    """
    if not config.cache.has_tiers:
        return None
    blocks = executor.kv_blocks if isinstance(executor, DirectExecutor) else None
    if blocks is None:
        raise ConfigError(NOT_KEPT)
    return BlockCopies(blocks, executor.capacity.num_blocks, kv_space(config, blocks.layout))


def with_space(answer: Attached, copies: BlockCopies | None) -> Attached:
    """The same, with what the scheduler must know to have blocks copied."""
    if copies is None:
        return answer
    return msgspec.structs.replace(answer, kv_space=copies.space, kv_slot_bytes=copies.slot_bytes)
