"""Copies of KV blocks between an executor's memory and the keeper's: between two steps, where the
memory is the host's; ``penstock.services.worker.gpu.block_transfers`` copies beside them."""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.protocol.config import Config, ConfigError
from penstock.protocol.kv_slots import HEADER_BYTES, holds, open_pool, seal, slot_bytes
from penstock.protocol.wire.messages.kv_tier import KVCopied, KVCopies, KVForget, split
from penstock.protocol.wire.messages.steps import Attached
from penstock.services.worker.executor import DirectExecutor, Executor
from penstock.services.worker.kv_space import kv_space

SWITCH_SECONDS = 0.0005
"""A thread that copies gets the interpreter after so long, where the worker's own thread, which
looks for the end of a step without sleeping, has it. It needs it for microseconds, but several
times a block: with Python's 5 ms four threads came to a tenth of the speed that they have alone."""
NOT_KEPT = (
    "--kv-tier-memory-bytes and --kv-tier-disk keep blocks of models with one kind of attention "
    "whose layers are on one device; this one keeps no keys and values, has layers with windows "
    "beside others, or computes on a GPU without its kernels: start it without them"
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


class Copies(Protocol):
    """Carries out what the scheduler asks for."""

    space: bytes
    slot_bytes: int
    piece_bytes: int
    """These are see ``Attached``."""

    @property
    def active(self) -> bool:
        """Whether something is under way that ``finished`` will answer."""

    def answer(
        self, message: KVCopies | KVForget, epoch: int, launched: int, expected: int
    ) -> KVCopied | None:
        """Copy in turn: behind the step that was ``launched`` last, where the next one is
        ``expected``. Behind a failure or a gap the blocks may be others' by now. ``None``:
        ``finished`` answers, or nothing does."""

    def finished(self) -> list[KVCopied]:
        """Answers to what is over."""

    def drop(self) -> None:
        """All blocks are about to be others'; what is under way is not answered."""


class KeeperMemory:
    """The keeper's slots. It may be gone meanwhile: its memory stays as long as it is mapped here,
    and what is copied into it then is lost."""

    def __init__(self, slot_bytes: int) -> None:
        self._slot_bytes = slot_bytes
        self._pool = ""
        self._memory: memoryview | None = None

    def slots(self, pool: str, numbers: Sequence[int]) -> list[memoryview]:
        """Raises ``OSError`` or ``ValueError`` where the keeper is gone or has no such slots."""
        if self._memory is None or self._pool != pool:
            descriptor = open_pool(pool, self._slot_bytes)
            try:
                size = os.fstat(descriptor).st_size
                self._memory = memoryview(mmap.mmap(descriptor, size))
            finally:
                os.close(descriptor)
            self._pool = pool
        memory, size = self._memory, self._slot_bytes
        check_numbers("slot", numbers, len(memory) // size)
        return [memory[number * size : (number + 1) * size] for number in numbers]


def check_numbers(what: str, numbers: Sequence[int], count: int) -> None:
    """Raises ``ValueError`` where one of them is not below ``count``."""
    wrong = [number for number in numbers if not 0 <= number < count]
    if wrong:
        raise ValueError(f"there is no {what} {wrong[0]}, but {count} of them")


class BlockCopies:
    """Copies at once, in the thread of the steps."""

    piece_bytes = 0
    active = False

    def __init__(self, blocks: BlockAccess, num_blocks: int, space: bytes) -> None:
        self.space, self.slot_bytes = space, slot_bytes(blocks.block_bytes)
        self._blocks, self._num_blocks = blocks, num_blocks
        self._memory = KeeperMemory(self.slot_bytes)
        self._own = memoryview(bytearray(self.slot_bytes))
        """A slot that nobody else writes into: what is sealed or checked is what is copied."""

    def answer(
        self, message: KVCopies | KVForget, epoch: int, launched: int, expected: int
    ) -> KVCopied | None:
        """See ``Copies``."""
        if isinstance(message, KVForget):
            return None  # what was asked for is done
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
            places = self._memory.slots(message.pool, message.slots)
            check_numbers("block", message.blocks, self._num_blocks)
            for block, place, key in zip(message.blocks, places, keys, strict=True):
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

    def finished(self) -> list[KVCopied]:
        """Nothing is under way."""
        return []

    def drop(self) -> None:
        """Nothing is under way."""

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


def copies_of(config: Config, executor: Executor) -> Copies | None:
    """What copies the executor's blocks to the keeper and back; ``None``: nobody asks for it.

    Raises ``ConfigError`` where blocks are to be kept that cannot be copied.
    """
    if not config.cache.has_tiers:
        return None
    if not isinstance(executor, DirectExecutor):
        return _of_device(config, executor)
    blocks = executor.kv_blocks
    if blocks is None:
        raise ConfigError(NOT_KEPT)
    return BlockCopies(blocks, executor.capacity.num_blocks, kv_space(config, blocks.layout))


def _of_device(config: Config, executor: Executor) -> Copies:
    """Of an executor with torch, which is imported by now."""
    from penstock.services.worker.gpu.block_transfers import BlockTransfers
    from penstock.services.worker.gpu.executor import GpuExecutor

    if not isinstance(executor, GpuExecutor) or executor.capacity.groups:
        raise ConfigError(NOT_KEPT)
    sys.setswitchinterval(SWITCH_SECONDS)
    pool = executor.decoder.kv_pool
    blocks = pool.blocks[: executor.capacity.num_blocks]
    return BlockTransfers(blocks, kv_space(config, pool.layout))


def with_space(answer: Attached, copies: Copies | None) -> Attached:
    """The same, with what the scheduler must know to have blocks copied."""
    if copies is None:
        return answer
    return msgspec.structs.replace(
        answer,
        kv_space=copies.space,
        kv_slot_bytes=copies.slot_bytes,
        kv_piece_bytes=copies.piece_bytes,
    )
