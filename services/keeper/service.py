"""The keeper's process: KV blocks of all engines of this host, by their content's names.

It outlives workers, schedulers and the router. Its own death costs what only its memory held, never
a request: engines then compute what they would have read.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from pathlib import Path

from penstock.protocol.config import Config
from penstock.protocol.kv_slots import SPACE_BYTES
from penstock.protocol.process.loop_service import LoopService
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import (
    TierDrop,
    TierGet,
    TierOpen,
    TierOpened,
    TierRelease,
    TierStored,
    split,
)
from penstock.protocol.wire.messages.membership import Peer, Phase
from penstock.protocol.wire.security import SecurityError, private_folder
from penstock.services.keeper.disk_threads import DiskThreads
from penstock.services.keeper.disk_tier import DiskTier
from penstock.services.keeper.pool import SlotPool
from penstock.services.keeper.space import Space

MOST_SPACES = 64
LEAST_SLOTS = 8
MOST_AHEAD_SLOTS = 1 << 20
"""Blocks that are so small that there would be more are not read ahead of their use."""
DISK_POLL_SECONDS = 0.001


class KeeperService(LoopService):
    """Answers schedulers; what disks take long for is done in threads."""

    name = "keeper"

    def __init__(self, config: Config) -> None:
        folder = config.cache.kv_tier_disk
        if folder:
            _check_folder(Path(folder))
        super().__init__(config)
        self.metrics = Registry()
        self._disk: DiskTier | None = None
        self._threads: DiskThreads | None = None
        if folder:
            self._disk = DiskTier(Path(folder).absolute(), config.cache.kv_tier_disk_bytes)
            self._threads = DiskThreads(self._disk)
        self._most_unused = max(1, len(config.server.expected_models) - 1)
        """Spaces that no engine has (any more) and that stay when another one is made: with that
        one as many as there are models, which take turns where they sleep."""
        self._spaces: OrderedDict[bytes, Space] = OrderedDict()
        """Those last that engines began or ceased to use last."""
        self._space_of: dict[str, Space] = {}
        """By the address of a scheduler."""
        self._unopened: dict[str, TierOpen] = {}
        """Who is answered once the disk has been looked through, by address."""
        self._corrupted = 0
        self._skipped_writes = 0
        """Of spaces that are no more."""
        self._scanned = self._disk is None
        self._ahead_since = 0.0
        """When it began to read ahead."""

    def start(self) -> None:
        if self._threads is None or self._disk is None:
            self.set_phase(Phase.READY)
            return
        self.set_phase(Phase.LOADING, "looking what is on disk")
        disk = self._disk

        def scan() -> None:
            try:
                disk.scan()
            finally:
                self._scanned = True

        self._threads.first(scan)

    # --- schedulers

    def on_message(self, sender: int, message: Message, now: float) -> None:
        if isinstance(message, TierOpen):
            if self._scanned:
                self._open(message)
            else:
                self._unopened[message.reply_to] = message
            return
        if not isinstance(message, TierGet | TierRelease | TierStored | TierDrop):
            self.metrics.inc("dropped_messages_total", "unexpected")
            return
        space = self._space_of.get(message.reply_to)
        if space is None:
            self.metrics.inc("dropped_messages_total", "unexpected")
            self.mailbox.send(message.reply_to, TierOpened(b"", "", 0, []))
            return
        match message:
            case TierGet():
                space.get(message.reply_to, message.number, split(message.keys))
            case TierRelease():
                space.release(message.reply_to, message.number)
            case TierStored():
                keys = split(message.keys)
                space.stored(message.reply_to, keys, message.slots, message.unused)
            case TierDrop():
                keys = split(message.keys)
                self._corrupted += len(keys) if message.corrupted else 0
                space.drop(keys, corrupted=False)

    def _open(self, message: TierOpen) -> None:
        address, space = message.reply_to, self._spaces.get(message.space)
        if (before := self._space_of.pop(address, None)) is not None and before is not space:
            self._leave(before, address)
        refused = ""
        if space is None:
            num_slots = self.config.cache.tier_memory_bytes // max(1, message.slot_bytes)
            if len(message.space) != SPACE_BYTES:
                refused = "its engine has named no space"
            elif num_slots < LEAST_SLOTS:
                refused = (
                    f"{self.config.cache.tier_memory_bytes} bytes hold {num_slots} of its blocks "
                    f"of {message.slot_bytes} bytes, {LEAST_SLOTS} are the least; raise "
                    "--kv-tier-memory-bytes"
                )
            else:
                refused = self._make_space(message.space, num_slots, message.slot_bytes)
            space = self._spaces.get(message.space)
        elif space.pool.slot_bytes != message.slot_bytes and not space.owners:
            self._drop_space(message.space)  # made ahead by the size of damaged files
            self._open(message)
            return
        elif space.pool.slot_bytes != message.slot_bytes:
            refused = f"blocks of this space have {space.pool.slot_bytes} bytes"
        if space is None or refused:
            self.log.warning("blocks of an engine are not kept", reason=refused)
            self.mailbox.send(address, TierOpened(message.space, "", 0, [], refused))
            return
        self._space_of[address] = space
        self._spaces.move_to_end(message.space)
        space.open(address, message.lent)

    def _make_space(self, name: bytes, num_slots: int, slot_bytes: int) -> str:
        """Returns why it cannot be made; empty: it is."""
        unused = [one for one, space in self._spaces.items() if not space.owners]
        if len(self._spaces) - len(unused) >= MOST_SPACES:
            return f"{MOST_SPACES} others are kept, the most there can be"
        for one in unused[: max(0, len(unused) - self._most_unused)]:
            self._drop_space(one)
        try:
            pool = SlotPool(num_slots, slot_bytes)
            pool.take_ahead()
        except OSError as error:
            return f"the system refuses {num_slots * slot_bytes} bytes: {error.strerror}"
        self._spaces[name] = Space(name, pool, self.mailbox.send, self._disk, self._threads)
        return ""

    def _drop_space(self, name: bytes) -> None:
        space = self._spaces.pop(name)
        self._skipped_writes += space.skipped_writes
        space.pool.close()

    def on_gone(self, gone: dict[int, Peer], now: float) -> None:
        for peer in gone.values():
            self._unopened.pop(peer.address, None)
            if (space := self._space_of.pop(peer.address, None)) is not None:
                self._leave(space, peer.address)

    def _leave(self, space: Space, address: str) -> None:
        space.leave(address)
        if self._spaces.get(space.name) is space:
            self._spaces.move_to_end(space.name)

    # --- the disk

    def patience(self, now: float) -> float:
        threads = self._threads
        if threads is not None and (threads.reading or threads.writing or not self._scanned):
            return DISK_POLL_SECONDS
        return super().patience(now)

    def work(self, now: float) -> None:
        if self._threads is not None and self._disk is not None:
            if self._scanned and (self.status.phase == Phase.LOADING or self._unopened):
                self._found(self._disk)
            for done in self._threads.take_done():
                done.then(done)
            for name in self._disk.take_gone() if self._disk.gone else ():
                if (space := self._spaces.get(name.space)) is not None:
                    space.gone_from_disk(name.key)
        for space in self._spaces.values():
            space.read_ahead()
            if count := space.take_read_ahead():
                seconds = round(now - self._ahead_since, 3)
                self.log.info("kv blocks are in memory again", blocks=count, seconds=seconds)
            space.tell()

    def _begin_ahead(self, disk: DiskTier) -> None:
        """What was used last is read while the engines start that will ask for it."""
        for space, size in reversed(disk.latest(self._most_unused)):
            num_slots = self.config.cache.tier_memory_bytes // max(1, size)
            fits = LEAST_SLOTS <= num_slots <= MOST_AHEAD_SLOTS and space not in self._spaces
            if fits and not self._make_space(space, num_slots, size):
                self._ahead_since = time.monotonic()
                self._spaces[space].begin_ahead(disk.keys(space))

    def _found(self, disk: DiskTier) -> None:
        if self.status.phase == Phase.LOADING:
            self._begin_ahead(disk)
        unopened, self._unopened = self._unopened, {}
        for message in unopened.values():
            self._open(message)
        self.set_phase(Phase.READY)
        self.log.info("kv blocks on disk", bytes=disk.used, limit=disk.limit, foreign=disk.foreign)

    def on_tick(self, now: float) -> None:
        metrics, blocks, skipped = self.metrics, 0, self._skipped_writes
        for space in self._spaces.values():
            blocks += space.pool.num_blocks * space.pool.slot_bytes
            skipped += space.skipped_writes
            space.catch_up()
        metrics.counter("kv_tier_skipped_writes_total").value = float(skipped)
        metrics.set("kv_tier_used_bytes", blocks, "memory")
        corrupted = self._corrupted
        if self._disk is not None:
            metrics.set("kv_tier_used_bytes", self._disk.used, "disk")
            metrics.counter("kv_tier_failed_writes_total").value = float(self._disk.failed_writes)
            corrupted += self._disk.corrupted
        metrics.counter("kv_tier_corrupted_total").value = float(corrupted)
        self.report(metrics)

    def drained(self) -> bool:
        """What is on its way to the disk gets there."""
        return self._threads is None or not self._threads.writing


def _check_folder(folder: Path) -> None:
    """Raises ``SecurityError`` where others may look into it."""
    try:
        private_folder(folder)
    except SecurityError as error:
        text = str(error).replace("--runtime-dir", "--kv-tier-disk")
        raise SecurityError(f"--kv-tier-disk: {text}") from None


def run(config: Config) -> int:
    """Run the keeper until SIGTERM. Returns the exit code; raises ``SecurityError``."""
    return KeeperService(config).run()
