"""Holds up the thread that reads large bodies."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from support.frontend.frontend_scripted import Client

from penstock.services.frontend.context import CONTEXT


@contextmanager
def no_large_body_is_read(client: Client) -> Iterator[Callable[[], bool]]:
    """For the time of the block; gives a function that says whether one waits."""
    goes_on = threading.Event()
    thread = client.app[CONTEXT].large_bodies
    thread.submit(goes_on.wait, 60.0)
    try:
        yield lambda: thread._work_queue.qsize() > 0
    finally:
        goes_on.set()
