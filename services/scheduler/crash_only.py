"""A fault inside the scheduler's core ends the process.

Its queues, blocks and counts may contradict each other then. A process that begins anew is right
again, and the owners of its requests continue them there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


class CoreFailed(RuntimeError):
    """A method of the core raised; what it raised is the cause. Nothing may call it any more."""


def crash_only(method: Callable[P, R]) -> Callable[P, R]:
    """For a method of the core: whatever it raises becomes ``CoreFailed``, which no handler of a
    message or a tick takes for a fault of that message alone."""

    @functools.wraps(method)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(*args, **kwargs)
        except CoreFailed:
            raise
        except Exception as error:
            raise failure_in(method.__name__, error) from error

    return call


def failure_in(where: str, error: Exception) -> CoreFailed:
    """Names where the core raised what."""
    return CoreFailed(f"the scheduler's core failed in {where}: {type(error).__name__}: {error}")
