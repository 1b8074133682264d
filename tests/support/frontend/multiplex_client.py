"""A client's end of /v1/stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import msgspec
from support.frontend.frontend_scripted import STOP
from support.frontend.websocket_route import WebSocketRoute

from penstock.client.sink import RowExtras, Sink
from penstock.protocol.wire.messages.requests import Chat, PromptText, Work
from penstock.services.frontend.bodies.multiplex import ServerFrame

PATH = "/v1/stream"
HI = {"messages": [{"role": "user", "content": "hi"}]}
ENDS = ("end", "error")


class Socket:
    """A client's end, which speaks JSON or msgpack."""

    def __init__(self, raw: aiohttp.ClientWebSocketResponse) -> None:
        self.raw = raw
        self.packs = False
        self.passed: list[dict[str, Any]] = []
        """Frames that came while one of another request was wanted."""

    async def send(self, **frame: Any) -> None:
        if self.packs:
            await self.raw.send_bytes(msgspec.msgpack.encode(frame))
        else:
            await self.raw.send_str(json.dumps(frame))

    async def chat(self, name: str, text: str = "hi", **fields: Any) -> None:
        messages = [{"role": "user", "content": text}]
        await self.send(id=name, type="chat", body={"messages": messages, **fields})

    async def complete(self, name: str, prompt: Any, **fields: Any) -> None:
        await self.send(id=name, type="completion", body={"prompt": prompt, **fields})

    async def cancel(self, name: str) -> None:
        await self.send(id=name, type="cancel")

    async def frame(self) -> dict[str, Any]:
        """The next frame, in the encoding that is spoken and as it is declared."""
        message = await self.raw.receive()
        if message.type is aiohttp.WSMsgType.BINARY:
            assert self.packs
            return decoded(msgspec.msgpack.decode(message.data))
        assert message.type is aiohttp.WSMsgType.TEXT and not self.packs, message
        return decoded(json.loads(message.data))

    async def frames(self, name: str | None) -> list[dict[str, Any]]:
        """The frames of one request up to its end; or the next error that ends none."""
        found = [one for one in self.passed if one["id"] == name]
        self.passed = [one for one in self.passed if one["id"] != name]
        while not found or found[-1]["type"] not in ENDS:
            frame = await self.frame()
            (found if frame["id"] == name else self.passed).append(frame)
        return found

    async def error(self, name: str | None = None) -> dict[str, Any]:
        *earlier, last = await self.frames(name)
        assert earlier == [] and last["type"] == "error", (earlier, last)
        assert set(last["error"]) == {"message", "type", "param", "code"}
        return last

    async def closed(self) -> aiohttp.WSMessage:
        message = await self.raw.receive()
        assert message.type in (aiohttp.WSMsgType.CLOSE, aiohttp.WSMsgType.CLOSED), message
        return message


def decoded(frame: dict[str, Any]) -> dict[str, Any]:
    msgspec.convert(frame, ServerFrame)
    return frame


def text(frames: list[dict[str, Any]], choice: int = 0) -> str:
    return "".join(
        one["text"] for one in frames if one["type"] == "text" and one.get("choice", 0) == choice
    )


ROUTE = WebSocketRoute(PATH, Socket)
connected, talk = ROUTE.connected, ROUTE.talk


def said(work: Work) -> str:
    """The last message, or the prompt."""
    if isinstance(work.prompt, Chat):
        return str(json.loads(work.prompt.messages)[-1]["content"])
    assert isinstance(work.prompt, PromptText)
    return work.prompt.text


async def until_told(work: Work, sink: Sink) -> None:
    """Answer with the question; one that is long has no end."""
    sink.on_accepted(1)
    sink.on_row(0, f"re: {said(work)}", 1)
    if said(work) == "long":
        await asyncio.sleep(3600)
    sink.on_row(0, ".", 1, RowExtras(end=STOP))
