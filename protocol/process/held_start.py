"""How a process that was started ahead hears that it is wanted: by a byte from a pipe."""

from __future__ import annotations

import os

WANTED = b"1"


def wait_until_wanted(descriptor: int) -> bool:
    """Returns whether ``WANTED`` came; else whoever holds the other end is gone."""
    wanted = os.read(descriptor, len(WANTED)) == WANTED
    os.close(descriptor)
    return wanted
