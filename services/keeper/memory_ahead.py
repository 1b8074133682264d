"""Memory of a pool that is taken from the system before it is written.

A page that is written for the first time has to be found and cleared by the system first, which is
slower than all else on the way of a block: eight threads write new memory at 2 to 5 GB/s and memory
that is there at 40 (NVIDIA H200, 16 cores of its host). Slots are used from the first one on, so
threads take what lies behind those in use.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from pathlib import Path

MOST_AHEAD_BYTES = 32 << 30
MOST_AHEAD_SHARE = 0.5
"""So much of the pool at most …"""
MOST_AVAILABLE_SHARE = 0.25
"""… and so much of what the host has available."""
PIECE_BYTES = 32 << 20
THREADS = max(1, min(4, len(os.sched_getaffinity(0)) // 4))
_MADV_POPULATE_WRITE = 23
"""Linux 5.14 and later; madvise(2)."""


class MemoryAhead:
    """Of one pool. ``used`` and ``end`` are for the keeper's own thread."""

    def __init__(self, memory: mmap.mmap) -> None:
        """Begins at once. The memory stays mapped until ``end``."""
        self._memory, self._size = memory, len(memory)
        self._address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._used = self._begun = 0
        """Bytes from the beginning on: of slots that were taken, and of what is populated."""
        self._ended = False
        self._changed = threading.Condition()
        for _ in range(THREADS):
            threading.Thread(target=self._run, name="memory ahead", daemon=True).start()

    def used(self, end: int) -> None:
        """A slot that ends there is in use from now on."""
        if end > self._used:
            with self._changed:
                self._used = end
                self._changed.notify_all()

    def end(self) -> None:
        """Take no more."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _run(self) -> None:
        while (begin := self._next()) is not None:
            if not _populate(self._address + begin, min(PIECE_BYTES, self._size - begin)):
                self.end()

    def _next(self) -> int | None:
        """Where the next piece begins, when it is due; ``None``: there is no more."""
        most = min(MOST_AHEAD_BYTES, int(MOST_AHEAD_SHARE * self._size))
        with self._changed:
            while not self._ended and self._begun < self._size:
                ahead = min(most, int(MOST_AVAILABLE_SHARE * _available_bytes()))
                self._begun = max(self._begun, self._used // PIECE_BYTES * PIECE_BYTES)
                if self._begun < self._used + ahead:
                    self._begun += PIECE_BYTES
                    return self._begun - PIECE_BYTES
                self._changed.wait()
        return None


def _populate(address: int, count: int) -> bool:
    """Returns whether the system does that. Lets other threads run meanwhile."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(madvise(address, count, _MADV_POPULATE_WRITE) == 0)


def _available_bytes() -> int:
    """What the host can give without swapping; 0 where it does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0
    found = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(found[0]) * 1024 if found else 0
