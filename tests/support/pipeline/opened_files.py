"""How often a file is opened, by whichever process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

_EVENT = struct.Struct("iIII")
_OPEN = 0x20
"""``IN_OPEN``, inotify(7)."""


class Opened:
    """Counts from its making on."""

    def __init__(self, path: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
        assert libc.inotify_add_watch(self._descriptor, os.fsencode(path), _OPEN) >= 0
        self._count = 0

    @property
    def count(self) -> int:
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._descriptor, 65536):
                at = 0
                while at < len(data):
                    _, _, _, length = _EVENT.unpack_from(data, at)
                    at += _EVENT.size + length
                    self._count += 1
        return self._count

    def close(self) -> None:
        os.close(self._descriptor)
