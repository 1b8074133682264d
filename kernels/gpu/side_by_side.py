"""Several versions of a kernel compiled at a time.

For three quarters of a compilation Triton needs no interpreter's lock (its passes, LLVM, ptxas).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Made = TypeVar("Made")
_MOST_THREADS = 8


def side_by_side(make: Callable[[Item], Made], items: Iterable[Item]) -> list[Made]:
    """``make`` of each item, in their order, in threads. Raises what the first that fails raises.

    ``make`` must only compile, load and allocate: whether a thread is in inference mode is its own
    matter, and these are in none.
    """
    with ThreadPoolExecutor(_MOST_THREADS, "compile") as threads:
        return list(threads.map(make, items))
