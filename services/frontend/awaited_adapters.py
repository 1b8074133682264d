"""Adapters that are being loaded by this process's wish: requests for them wait."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class AwaitedAdapters:
    def __init__(self) -> None:
        self._open: dict[str, asyncio.Event] = {}

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
        """Until an adapter is loaded, or could not be; at once where it is not awaited."""
        if (over := self._open.get(name)) is not None:
            await over.wait()
