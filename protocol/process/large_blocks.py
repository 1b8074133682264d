"""Memory goes back to the system: large blocks when they are freed, the rest when asked."""

from __future__ import annotations

import contextlib
import ctypes

_M_MMAP_THRESHOLD = -3
_LARGE_BYTES = 1024 * 1024


def give_back_large_blocks() -> None:
    """Keep glibc's allocator from keeping them.

    By itself it takes blocks of up to 32 MB from its own store once one of that size was freed
    (mallopt(3)), and a process that saw a few prompts of megabytes stays large: 200 MB were
    measured. Elsewhere than on glibc nothing happens.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, _LARGE_BYTES)


def give_back_freed() -> None:
    """Return whole pages that were freed (malloc_trim(3)): some milliseconds for a heap of some
    hundred megabytes, so meant for a process that has nothing else to do."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
