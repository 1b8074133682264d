"""A client's end of the WebSocket of the Responses API."""

from __future__ import annotations

import asyncio
import json
from typing import Any, cast

import aiohttp
from openai.types.responses import ResponsesServerEvent
from pydantic import TypeAdapter
from support.frontend.frontend_scripted import STOP
from support.frontend.websocket_route import WebSocketRoute

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import Chat, Work

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponsesServerEvent)
ENDS = ("response.completed", "response.incomplete", "response.failed")


class Socket:
    """A client's end."""

    def __init__(self, raw: aiohttp.ClientWebSocketResponse) -> None:
        self.raw = raw

    async def create(self, **body: Any) -> None:
        await self.raw.send_str(json.dumps({"type": "response.create", **body}))

    async def steer(self, target: str, text: str) -> None:
        steer = {"type": "response.steer", "previous_response_id": target, "input": text}
        await self.raw.send_str(json.dumps(steer))

    async def event(self) -> dict[str, Any]:
        """The next event, as the SDK's types demand it."""
        event: dict[str, Any] = json.loads(await self.raw.receive_str())
        EVENT.validate_python(event)
        return event

    async def until(self, *kinds: str) -> list[dict[str, Any]]:
        found = [await self.event()]
        while found[-1]["type"] not in kinds:
            found.append(await self.event())
        return found

    async def answer(self, **body: Any) -> dict[str, Any]:
        """The response that a request ends with."""
        await self.create(**body)
        events = await self.until(*ENDS, "error")
        assert events[-1]["type"] in ENDS, events[-1]
        return cast(dict[str, Any], events[-1]["response"])

    async def error(self, **body: Any) -> dict[str, Any]:
        await self.create(**body)
        (event,) = await self.until("error", *ENDS)
        return event

    async def closed(self) -> int | None:
        message = await self.raw.receive()
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return self.raw.close_code


ROUTE = WebSocketRoute(PATH, Socket)
connected, talk = ROUTE.connected, ROUTE.talk


def messages(work: Work) -> list[dict[str, Any]]:
    assert isinstance(work.prompt, Chat)
    found: list[dict[str, Any]] = json.loads(work.prompt.messages)
    return found


def text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item.get("content", ()))


async def until_cancelled(work: Work, sink: Sink) -> None:
    sink.on_accepted(1)
    said = messages(work)[-1]["content"]
    sink.on_row(0, f"re: {said}", 1)
    if said == "long":
        await asyncio.sleep(60)
    sink.on_row(0, ".", 1, RowExtras(end=STOP))
