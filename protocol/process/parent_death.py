"""A child ends with its parent, also when the parent is killed with ``kill -9``.

The child asks for it itself: no Python code has to run between fork and exec in a parent that has
threads.
"""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def end_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent, the process ``parent``, ends.

    Exits at once when the parent is gone already. SIGKILL, because nobody would be left to
    enforce the end of a drain.
    """
    library = ctypes.CDLL(None, use_errno=True)
    if library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:
        raise SystemExit(1)
