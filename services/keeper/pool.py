"""The shared memory of one space: slots of one size."""

from __future__ import annotations

import mmap
import os
import weakref
from collections import OrderedDict, deque
from secrets import token_hex

from penstock.protocol.kv_slots import pool_name
from penstock.services.keeper.memory_ahead import MemoryAhead


class SlotPool:
    """Which slot holds which block. A slot is free, lent to a scheduler that fills it, or holds a
    block; one that is pinned is read or written by somebody and stays as it is."""

    def __init__(self, num_slots: int, slot_bytes: int) -> None:
        """The memory belongs to no file that others could open, and is taken page by page as slots
        are first written to, unless ``take_ahead`` has done so. Raises ``OSError`` where the system
        refuses it."""
        self.num_slots, self.slot_bytes = num_slots, slot_bytes
        self._name = pool_name(token_hex(8), num_slots, slot_bytes)
        self._descriptor = os.memfd_create(self._name, os.MFD_CLOEXEC)
        self._close = weakref.finalize(self, os.close, self._descriptor)
        self._ahead: MemoryAhead | None = None
        os.fchmod(self._descriptor, 0o600)
        os.ftruncate(self._descriptor, num_slots * slot_bytes)
        self._memory = mmap.mmap(self._descriptor, num_slots * slot_bytes)
        self._view = memoryview(self._memory)
        self._free = deque(range(num_slots))
        """Those that came back last are taken last: a worker that was taken for lost may still
        write into them."""
        self._by_key: OrderedDict[bytes, int] = OrderedDict()
        """Those used least lately first."""
        self._pins = [0] * num_slots
        self._keys: list[bytes | None] = [None] * num_slots

    @property
    def path(self) -> str:
        """Where other processes of this user find the memory until it is closed, and its name;
        see ``penstock.protocol.kv_slots.open_pool``."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor} {self._name}"

    def take_ahead(self) -> None:
        """Have the system give memory before slots are written to."""
        self._ahead = MemoryAhead(self._memory)
        weakref.finalize(self, self._ahead.end)

    def close(self) -> None:
        """Nobody finds it any more; its memory is given back once no read and no write of a slot
        is under way."""
        if self._ahead is not None:
            self._ahead.end()
        self._close()

    @property
    def num_blocks(self) -> int:
        return len(self._by_key)

    @property
    def has_free(self) -> bool:
        """Whether a slot holds nothing and is nobody's."""
        return bool(self._free)

    def slot(self, number: int) -> memoryview:
        begin = number * self.slot_bytes
        return self._view[begin : begin + self.slot_bytes]

    def find(self, key: bytes) -> int | None:
        """The slot of a block, which counts as used now."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._by_key.move_to_end(key)
        return slot

    def slot_of(self, key: bytes) -> int | None:
        """The slot of a block, which does not count as used."""
        return self._by_key.get(key)

    def has(self, key: bytes) -> bool:
        return key in self._by_key

    def key(self, slot: int) -> bytes | None:
        """The block in a slot."""
        return self._keys[slot]

    def keys(self) -> list[bytes]:
        return list(self._by_key)

    def take(self) -> tuple[int, bytes | None] | None:
        """An empty slot, and the key of the block that was dropped for it, if one was. ``None``:
        all are in use."""
        if self._free:
            slot = self._free.popleft()
            if self._ahead is not None:
                self._ahead.used((slot + 1) * self.slot_bytes)
            return slot, None
        for key, slot in self._by_key.items():
            if not self._pins[slot]:
                self._unname(key, slot)
                return slot, key
        return None

    def fill(self, slot: int, key: bytes) -> bool:
        """A taken slot holds this block now. ``False``: another slot does already, and this one is
        free."""
        if key in self._by_key:
            self._by_key.move_to_end(key)
            self._free.append(slot)
            return False
        self._by_key[key] = slot
        self._keys[slot] = key
        return True

    def give_back(self, slot: int) -> None:
        """A taken slot is not needed."""
        self._free.append(slot)

    def pin(self, slot: int) -> None:
        self._pins[slot] += 1

    def unpin(self, slot: int) -> None:
        self._pins[slot] -= 1
        if not self._pins[slot] and self._keys[slot] is None:
            self._free.append(slot)

    def drop(self, key: bytes) -> None:
        """Forget a block; its slot is free once nobody reads it."""
        slot = self._by_key.get(key)
        if slot is not None:
            self._unname(key, slot)
            if not self._pins[slot]:
                self._free.append(slot)

    def _unname(self, key: bytes, slot: int) -> None:
        del self._by_key[key]
        self._keys[slot] = None
