"""What the routes of the Responses API share in one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from penstock.protocol.config.server_fields import ServerConfig
from penstock.services.frontend.bodies.openai_items import InputItem
from penstock.services.frontend.dialects.responses.chosen_store import make_store
from penstock.services.frontend.dialects.responses.conversations import Conversations
from penstock.services.frontend.dialects.responses.items import written
from penstock.services.frontend.dialects.responses.renderer import ResponsesRenderer
from penstock.services.frontend.dialects.responses.store import (
    MemoryStore,
    ResponseStore,
    StoredResponse,
)
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.websockets.session import LIMIT_SECONDS

LOCAL_BYTES = 256 * 1024 * 1024
"""What all connections of WebSockets remember together."""


class RunningResponse(NamedTuple):
    """A response that is being generated here."""

    generation: Generation
    renderer: ResponsesRenderer


class ResponsesState:
    def __init__(self, config: ServerConfig) -> None:
        """Raises ``ConfigError`` where responses cannot be kept as configured."""
        self.store: ResponseStore | None = make_store(
            config.response_store, config.response_store_bytes
        )
        self.local = MemoryStore(min(LOCAL_BYTES, config.response_store_bytes))
        """What connections remember, each by its own name."""
        self.running: dict[tuple[str, str], RunningResponse] = {}
        """By owner and id."""
        self.limit_s = LIMIT_SECONDS
        """How long a WebSocket may be open."""
        self._opening: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """The process begins to serve; it does not wait for the store."""
        if self.store is not None:
            self._opening = asyncio.get_running_loop().create_task(self.store.open())

    async def end(self) -> None:
        """The process ends."""
        if self.store is None:
            return
        if self._opening is not None:
            self._opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._opening
        await self.store.close()

    def conversations(self, owner: str) -> Conversations:
        return Conversations(owner, self.store)

    def stores(self, wanted: bool | None) -> bool:
        """Whether a response is to be kept. Raises ``ApiError`` 400 where that cannot be."""
        if self.store is None and wanted:
            raise bad_request(
                "store is true, but this server keeps no responses (--response-store off); leave "
                "it out or send false",
                "store",
            )
        return self.store is not None and wanted is not False

    def refuse_off(self) -> None:
        """Raises ``ApiError`` 400 where nothing that was stored can be asked for."""
        if self.store is None:
            raise ApiError(
                400,
                "This server keeps no responses (--response-store off)",
                code="response_store_off",
            )


def kept(own: list[InputItem], answer_id: str, renderer: ResponsesRenderer) -> StoredResponse:
    """What is stored of a response that has ended."""
    listed: list[dict[str, Any]] = [
        written(item, answer_id, index) for index, item in enumerate(own)
    ]
    response = renderer.response
    return StoredResponse(
        response=msgspec.json.encode(response),
        input=msgspec.json.encode(listed),
        previous=response.previous_response_id or "",
    )


RESPONSES = web.AppKey("responses", ResponsesState)
