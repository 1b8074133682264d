"""What clients of every WebSocket do alike."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, TypeVar

import aiohttp
import pytest
from support.frontend.frontend_scripted import Client, Script, ScriptedGateway, run

from penstock.protocol.config.server_fields import ServerConfig

End = TypeVar("End")


class WebSocketRoute(Generic[End]):
    """Connects to a path; ``make`` wraps a client's end."""

    def __init__(self, path: str, make: Callable[[aiohttp.ClientWebSocketResponse], End]) -> None:
        self._path = path
        self._make = make

    @asynccontextmanager
    async def connected(self, client: Client, **kwargs: Any) -> AsyncIterator[End]:
        async with client.session.ws_connect(client.url + self._path, **kwargs) as raw:
            yield self._make(raw)

    async def refused(self, client: Client, **headers: str) -> int:
        """The status with which the connection is refused."""
        with pytest.raises(aiohttp.WSServerHandshakeError) as caught:
            await client.session.ws_connect(client.url + self._path, headers=headers)
        return caught.value.status

    def talk(
        self,
        use: Callable[[Client, End], Awaitable[None]],
        script: Script | None = None,
        config: ServerConfig | None = None,
        *,
        stall_s: float = 60.0,
    ) -> ScriptedGateway:
        async def with_socket(client: Client) -> None:
            async with self.connected(client) as socket:
                await use(client, socket)

        return run(with_socket, script, config, stall_s=stall_s)
