"""Adapters that are being loaded by this process's wish: requests for them wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from penstock.services.frontend.errors import ApiError, retry_after

WAIT_SECONDS = 60.0
"""A request waits so long for an adapter that is being loaded, at most."""
MAX_WAITING = 1000
"""Requests that wait for adapters, at most."""


class AwaitedAdapters:
    def __init__(self, wait_s: float = WAIT_SECONDS, max_waiting: int = MAX_WAITING) -> None:
        self._open: dict[str, asyncio.Event] = {}
        self._wait_s, self._max_waiting = wait_s, max_waiting
        self.waiting = 0
        """Requests that wait now."""

    def __contains__(self, name: str) -> bool:
        return name in self._open

    @contextlib.asynccontextmanager
    async def loading(self, name: str) -> AsyncIterator[None]:
        """Requests for the adapter wait while this is open; one at a time may be, of a name."""
        over = self._open[name] = asyncio.Event()
        try:
            yield
        finally:
            del self._open[name]
            over.set()

    async def wait(self, name: str) -> None:
        """Until an adapter is loaded, or could not be; at once where it is not awaited.

        Raises ``ApiError`` 503 where too many wait, or it takes too long.
        """
        if (over := self._open.get(name)) is None:
            return
        if self.waiting >= self._max_waiting:
            raise _still_loading(f"{self.waiting} requests wait for it and others, as many as may")
        self.waiting += 1
        try:
            async with asyncio.timeout(self._wait_s):
                await over.wait()
        except TimeoutError:
            raise _still_loading(f"it was not there within {self._wait_s:g} s") from None
        finally:
            self.waiting -= 1


def _still_loading(reason: str) -> ApiError:
    return ApiError(
        503,
        f"The adapter is being loaded, and {reason}; try again",
        kind="overloaded_error",
        code="adapter_loading",
        headers=retry_after(1.0),
    )
