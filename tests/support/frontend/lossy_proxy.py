"""Stands between a client and a Valkey server: it can hold replies back, and lose them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class LossyProxy:
    """Every command reaches the server."""

    def __init__(self, port: int) -> None:
        self._upstream = port
        self.port = 0
        self.go_on = asyncio.Event()
        """Cleared, no reply gets through."""
        self.go_on.set()
        self.loses = 0
        """Calls of scripts whose replies are lost, with their connections."""
        self.lost = asyncio.Event()
        """One was."""
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    async def serve(self, client: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        reader, server = await asyncio.open_connection("127.0.0.1", self._upstream)
        is_lost = asyncio.Event()

        async def commands() -> None:
            while data := await client.read(1 << 16):
                if b"EVALSHA" in data and self.loses:
                    self.loses -= 1
                    is_lost.set()
                server.write(data)

        async def replies() -> None:
            while data := await reader.read(1 << 16):
                await self.go_on.wait()
                if is_lost.is_set():
                    self.lost.set()
                    return
                writer.write(data)

        both = [asyncio.create_task(one) for one in (commands(), replies())]
        self._tasks |= set(both)
        with contextlib.suppress(OSError):
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        for task in both:
            task.cancel()
        writer.close()
        server.close()

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)


@contextlib.asynccontextmanager
async def lossy_proxy(port: int) -> AsyncIterator[LossyProxy]:
    """In front of the server at this port, within the event loop that runs."""
    proxy = LossyProxy(port)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.port = server.sockets[0].getsockname()[1]
    try:
        yield proxy
    finally:
        server.close()
        await proxy.end()
