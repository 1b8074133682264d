"""The cyclic garbage collector of a process that has started."""

from __future__ import annotations

import gc

YOUNG_OBJECTS = 10_000
"""Objects made and not freed since the last look at young ones until the next: those of hundreds of
open requests. With Python's own 700 each burst of 64 requests is walked through, and what it made
is freed by its reference counts anyway."""


def settle() -> None:
    """What is there stays: it is collected once, and never walked through again."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
