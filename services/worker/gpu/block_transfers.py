"""Copies of KV blocks between a device's memory and the keeper's, beside the steps.

    store   blocks ──► device staging ──► host staging ──► header and checksum ──► the keeper's slot
            a stream        another one                     a thread
            beside the steps that are under way
    load    the keeper's slot ──► host staging ──► checked ──► blocks
            a thread, once the steps are over that were launched before       a stream of its own

The thread of the steps only puts copies on streams, and looks whether something is over. What is
stored was completed by a step that is answered, and no step that is launched writes there: so it
waits for none of them, and the next one waits until it has left KV memory, not until it is in the
host's. Blocks that are loaded are nobody's until the scheduler hears that they are there, but steps
that are under way may still use what they held before: a load begins when these are over, and waits
beside the stream, not on it, where it would hold up all loads that came before. If the scheduler
does not want the blocks any more (``forget``), what is on the stream already is over before the
steps that are launched next.

Of loads that are under way at a time that one goes first of which least is left, and to that a part
of all that came before it is added: whoever waits for a short one runs sooner, and a long one is
not overtaken for ever.

Staging is the worker's own memory: what is checked there is what is loaded, whoever writes into the
keeper's slots meanwhile. The keeper's memory is not registered with the driver: that would take all
of it at once, and the driver's locks while steps are launched.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Iterator
from queue import Empty, PriorityQueue

import numpy as np
import torch
from torch import Tensor

from penstock.protocol.kv_slots import HEADER_BYTES, holds, seal, slot_bytes
from penstock.protocol.wire.messages.kv_tier import (
    STORES_AT_A_TIME,
    URGENT_STORES,
    KVCopied,
    KVCopies,
    KVForget,
)
from penstock.services.worker.direct_copy import DirectCopies
from penstock.services.worker.gpu.transfer_parts import (
    Group,
    Landing,
    Mark,
    Raised,
    Staging,
    Transfer,
)
from penstock.services.worker.kv_copies import KeeperMemory, check_numbers
from penstock.services.worker.memory import TIER_STAGING_BYTES

MOST_THREADS = 8
"""Many more wait for the interpreter's lock."""
GROUP_BYTES = 4 << 20
"""Stored by one thread at a time, or one block where it is larger."""
LOAD_BYTES = 8 << 20
"""The same of loads: of a small group the interpreter's part takes longer than the copies."""
LANDINGS = 2
"""Of a thread: it fills one while the other one is copied to the device."""
OVERTAKING = 10
"""A load goes ahead of an older one that has a block more left while so many blocks at most were
asked for between them."""
MOST_PIECE_BLOCKS = 32
"""Blocks of a message that stores. Each is a copy of its own, some 5 us of the thread that launches
steps, and small blocks are soon copied."""


class BlockTransfers:
    """See the module. All but what threads do is called from the thread of the steps."""

    def __init__(self, blocks: Tensor, space: bytes, threads: int | None = None) -> None:
        """blocks: [num_blocks, …], each of them contiguous. Takes all staging memory."""
        self._blocks = blocks.flatten(1).view(torch.uint8)
        self._block_bytes = self._blocks.shape[1]
        self.space, self.slot_bytes = space, slot_bytes(self._block_bytes)
        self._device = blocks.device
        self._on_gpu = blocks.device.type == "cuda"
        self._memory = KeeperMemory(self.slot_bytes)
        cores = len(os.sched_getaffinity(0))
        self._threads = threads or max(1, min(MOST_THREADS, cores // 2))
        self._rows = max(1, GROUP_BYTES // self.slot_bytes)
        """Blocks of a group that is stored, and …"""
        self._load_rows = max(1, LOAD_BYTES // self.slot_bytes)
        """… of one that is loaded."""
        pieces = STORES_AT_A_TIME + URGENT_STORES
        groups = max(pieces, TIER_STAGING_BYTES // (self._rows * self.slot_bytes))
        self._stores = deque(self._staging() for _ in range(groups))
        self.piece_bytes = min(groups // pieces * self._rows, MOST_PIECE_BLOCKS) * self.slot_bytes
        self._gather, self._down, self._up = (self._stream(priority) for priority in (-1, 0, 0))
        self._tasks: PriorityQueue[tuple[int, int, Group]] = PriorityQueue()
        """By what is left of their loads and their rank; stores go first."""
        self._order = itertools.count()
        self._asked = 0
        """Blocks of all loads so far."""
        self._waiting: deque[tuple[Transfer, Mark]] = deque()
        """Loads, and the steps behind which each begins."""
        self._done: deque[tuple[Transfer, Staging | None, bool]] = deque()
        """Groups that are over: of what, the staging that comes back, whether it was the last."""
        self._under_way: dict[int, Transfer] = {}
        for _ in range(self._threads):
            own = [self._landing() for _ in range(LANDINGS)]
            threading.Thread(target=self._run, args=(own,), name="kv blocks", daemon=True).start()

    def _staging(self) -> Staging:
        shape = self._rows, self.slot_bytes
        device = torch.zeros(shape, dtype=torch.uint8, device=self._device)
        host = torch.zeros(shape, dtype=torch.uint8, pin_memory=self._on_gpu)
        return Staging(device, host, [memoryview(row) for row in host.numpy()])

    def _landing(self) -> Landing:
        shape = self._load_rows, self.slot_bytes
        host = torch.zeros(shape, dtype=torch.uint8, pin_memory=self._on_gpu)
        contents = [row[HEADER_BYTES : HEADER_BYTES + self._block_bytes] for row in host]
        direct = None
        if self._up is not None and DirectCopies.possible():
            direct = DirectCopies(self._up.cuda_stream)
        return Landing([memoryview(row) for row in host.numpy()], contents, direct)

    def _stream(self, priority: int) -> torch.cuda.Stream | None:
        if not self._on_gpu:
            return None
        return torch.cuda.Stream(self._device, priority=priority)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def _on(self, stream: torch.cuda.Stream | None, after: Mark | None) -> Iterator[Mark]:
        """Put work on a stream behind a mark of another one; what is given marks its end."""
        mark = Mark(self._on_gpu)
        with torch.inference_mode(), torch.cuda.stream(stream):
            if after is not None:
                after.precede()
            yield mark
            mark.set()

    # --- the thread of the steps

    @property
    def active(self) -> bool:
        return bool(self._under_way or self._done)

    def answer(
        self, message: KVCopies | KVForget, epoch: int, launched: int, expected: int
    ) -> KVCopied | None:
        """See ``Copies``; begins what is asked for."""
        if isinstance(message, KVForget):
            if message.epoch == epoch:
                self.forget(message.number)
            return None
        in_turn = message.epoch == epoch and message.after == launched
        refused = KVCopied(message.epoch, message.number, 0, 0.0)
        if not in_turn or expected != (launched + 1 if launched else 0) or not message.blocks:
            return refused
        try:
            slots = self._memory.slots(message.pool, message.slots)
            check_numbers("block", message.blocks, len(self._blocks))
        except (OSError, ValueError) as error:
            failure = f"{type(error).__name__}: {error}"
            return KVCopied(message.epoch, message.number, 0, 0.0, failure=failure)
        begin = self._store if message.store else self._load
        if not begin(message, slots):
            return refused
        return None

    def _store(self, message: KVCopies, slots: list[memoryview]) -> bool:
        """As many as there is staging for. Returns whether there is any."""
        starts = range(0, len(slots), self._rows)[: len(self._stores)]
        if not starts:
            return False
        transfer = self._begin(message, slots, len(starts))
        transfer.done = min(len(slots), len(starts) * self._rows)
        groups = [(start, self._stores.popleft()) for start in starts]
        blocks = iter(message.blocks)
        with self._on(self._gather, None) as gathered:
            for _, staging in groups:
                for row, block in zip(staging.device, blocks, strict=False):
                    row[HEADER_BYTES : HEADER_BYTES + self._block_bytes].copy_(
                        self._blocks[block], non_blocking=True
                    )
        gathered.precede()  # what the next step may overwrite
        for start, staging in groups:
            count = min(self._rows, len(slots) - start)
            with self._on(self._down, gathered) as fetched:
                staging.host[:count].copy_(staging.device[:count], non_blocking=True)
            self._give(Group(transfer, start, fetched, staging))
        return True

    def _load(self, message: KVCopies, slots: list[memoryview]) -> bool:
        starts = range(0, len(slots), self._load_rows)
        transfer = self._begin(message, slots, len(starts))
        transfer.rank = self._asked // OVERTAKING
        self._asked += len(slots)
        with self._on(None, None) as launched:
            pass
        self._waiting.append((transfer, launched))
        self._begin_loads()
        return True

    def _begin_loads(self) -> None:
        """Those whose blocks no step uses any more."""
        while self._waiting and self._waiting[0][1].is_passed:
            transfer, _ = self._waiting.popleft()
            transfer.began = time.perf_counter()
            starts = range(0, len(transfer.places), self._load_rows)
            for start in starts[: self._threads]:  # each brings the one behind it, see ``_run``
                self._give(Group(transfer, start))

    def _give(self, group: Group) -> None:
        """Let a thread copy this."""
        transfer, turn = group.transfer, 0
        if group.staging is None:
            turn = len(transfer.places) - group.start + transfer.rank
        self._tasks.put((turn, next(self._order), group))

    def _begin(self, message: KVCopies, slots: list[memoryview], groups: int) -> Transfer:
        transfer = self._under_way[message.number] = Transfer(message, slots, groups)
        return transfer

    def finished(self) -> list[KVCopied]:
        """Answers to what is over; and begins what may."""
        self._begin_loads()
        answers = []
        while self._done:
            transfer, staging, last = self._done.popleft()
            if staging is not None:
                self._stores.append(staging)
            if last and self._under_way.get(transfer.message.number) is transfer:
                del self._under_way[transfer.message.number]
                answers.append(transfer.answer())
        return answers

    def forget(self, number: int) -> None:
        """Let a load write nothing behind the steps that are launched from now on; it is not
        answered."""
        transfer = self._under_way.pop(number, None)
        if transfer is None or transfer.message.store:
            return
        with transfer.lock:
            transfer.forgotten = True
        if self._up is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._up)

    def drop(self) -> None:
        """KV memory is about to be empty."""
        for number in list(self._under_way):
            self.forget(number)

    # --- other threads

    def _run(self, landings: list[Landing]) -> None:
        turns = itertools.cycle(landings)
        before: Raised | None = None
        while True:
            group = self._next_task(wait=before is None)
            raised = None
            if group is not None and group.staging is None:
                raised = self._bring(group, next(turns))
                following = group.start + self._threads * self._load_rows
                if following < len(group.transfer.places):
                    self._give(group._replace(start=following))
            self._landed(before)
            before = raised
            if group is not None and group.staging is not None:
                self._put_away(group, group.staging)

    def _next_task(self, *, wait: bool) -> Group | None:
        try:
            return self._tasks.get(block=wait)[2]
        except Empty:
            return None

    def _put_away(self, group: Group, staging: Staging) -> None:
        """From host staging into the keeper's slots."""
        transfer, at = group.transfer, group.start
        places = transfer.places[at : at + self._rows]
        try:
            if group.fetched is not None:
                group.fetched.wait()
            for row, place in zip(staging.rows, places, strict=False):
                seal(row, self.space, transfer.keys[at], self._block_bytes)
                np.copyto(np.asarray(place), np.asarray(row))
                at += 1
        except Exception as error:  # a thread that ends would leave all that waits without answer
            transfer.stopped_at(at, failure=f"{type(error).__name__}: {error}")
        self._done.append((transfer, staging, transfer.over()))

    def _bring(self, group: Group, own: Landing) -> Raised:
        """From the keeper's slots into blocks, up to one that is not what was stored."""
        transfer, at = group.transfer, group.start
        places = transfer.places[at : at + self._load_rows]
        brought = None
        try:
            for row, place in zip(own.rows, places, strict=False):
                if transfer.forgotten or at >= transfer.done:
                    break
                np.copyto(np.asarray(row), np.asarray(place))
                if not holds(row, self.space, transfer.keys[at]):
                    transfer.stopped_at(at, corrupted=True)
                    break
                at += 1
            brought = self._raise(group, at, own)
        except Exception as error:
            transfer.stopped_at(group.start, failure=f"{type(error).__name__}: {error}")
        return Raised(group, brought)

    def _landed(self, raised: Raised | None) -> None:
        """Wait until a group is in its blocks: what it was copied from is free again."""
        if raised is None:
            return
        transfer = raised.group.transfer
        try:
            if raised.brought is not None:
                raised.brought.wait()
        except Exception as error:
            transfer.stopped_at(raised.group.start, failure=f"{type(error).__name__}: {error}")
        self._done.append((transfer, None, transfer.over()))

    def _raise(self, group: Group, end: int, own: Landing) -> Mark | DirectCopies | None:
        """From the host into blocks, unless nobody wants them any more. Returns what to wait
        for."""
        transfer = group.transfer
        blocks = transfer.message.blocks[group.start : end]
        with transfer.lock:
            if transfer.forgotten or not blocks:
                return None
            if (direct := own.direct) is None:
                with self._on(self._up, None) as brought:
                    for content, block in zip(own.contents, blocks, strict=False):
                        self._blocks[block].copy_(content, non_blocking=True)
                return brought
            for content, block in zip(own.contents, blocks, strict=False):
                target = self._blocks.data_ptr() + block * self._blocks.stride(0)
                direct.copy(target, content.data_ptr(), self._block_bytes)
            direct.mark()
        return direct
