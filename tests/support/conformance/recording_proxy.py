"""What a client sends to a server and gets from it: a proxy between them that keeps all of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web
from multidict import CIMultiDict

_OF_THE_CONNECTION = ("host", "connection", "transfer-encoding", "content-length", "upgrade")
MAX_BODY = 64 * 1024 * 1024


@dataclass
class Exchange:
    """A request and its answer, or a WebSocket with its messages."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes = b""
    status: int = 0
    answer: bytes = b""
    sent: list[str] = field(default_factory=list)
    received: list[str] = field(default_factory=list)

    def asked(self) -> Any:
        return json.loads(self.body)

    def asked_on_socket(self) -> list[Any]:
        return [json.loads(one) for one in self.sent]

    def events(self) -> list[dict[str, Any]]:
        """Those of a stream, or of a WebSocket."""
        if self.received:
            return [json.loads(one) for one in self.received]
        lines = self.answer.decode().splitlines()
        return [json.loads(line[6:]) for line in lines if line.startswith("data: ")]


class RecordingProxy:
    """Listens in a thread of its own, while ``with`` lasts."""

    def __init__(self, upstream: str) -> None:
        self.upstream = upstream
        self.exchanges: list[Exchange] = []
        self.url = ""
        self._started, self._ended = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=asyncio.run, args=(self._main(),), daemon=True)

    def __enter__(self) -> RecordingProxy:
        self._thread.start()
        assert self._started.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(10)

    async def _main(self) -> None:
        async with self._running() as self.url:
            self._started.set()
            await asyncio.to_thread(self._ended.wait)

    @asynccontextmanager
    async def _running(self) -> AsyncIterator[str]:
        app = web.Application(client_max_size=MAX_BODY)
        app.router.add_route("*", "/{path:.*}", self._handle)
        runner = web.AppRunner(app, shutdown_timeout=1.0)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        async with aiohttp.ClientSession(auto_decompress=False) as self._session:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        exchange = Exchange(request.method, request.path_qs, dict(request.headers))
        self.exchanges.append(exchange)
        if request.headers.get("upgrade", "").lower() == "websocket":
            return await self._forward_socket(request, exchange)
        exchange.body = await request.read()
        url, headers = self.upstream + request.path_qs, _forwarded(request.headers)
        async with self._session.request(
            request.method, url, headers=headers, data=exchange.body or None, allow_redirects=False
        ) as answer:
            exchange.status = answer.status
            response = web.StreamResponse(
                status=answer.status, reason=answer.reason, headers=_forwarded(answer.headers)
            )
            await response.prepare(request)
            async for chunk in answer.content.iter_any():
                exchange.answer += chunk
                await response.write(chunk)
            await response.write_eof()
            return response

    async def _forward_socket(self, request: web.Request, exchange: Exchange) -> web.StreamResponse:
        headers = _forwarded(request.headers)
        for name in [name for name in headers if name.lower().startswith("sec-websocket")]:
            del headers[name]
        url = self.upstream + request.path_qs
        async with self._session.ws_connect(url, headers=headers, max_msg_size=MAX_BODY) as server:
            exchange.status = 101
            client = web.WebSocketResponse(max_msg_size=MAX_BODY)
            await client.prepare(request)
            back = asyncio.create_task(_pass_on(server, client, exchange.received))
            await _pass_on(client, server, exchange.sent)
            await server.close()
            await back
            return client


Socket = web.WebSocketResponse | aiohttp.ClientWebSocketResponse


async def _pass_on(source: Socket, target: Socket, kept: list[str]) -> None:
    async for message in source:
        if message.type == aiohttp.WSMsgType.TEXT:
            kept.append(message.data)
            await target.send_str(message.data)
    await target.close()


def _forwarded(headers: Any) -> CIMultiDict[str]:
    kept = [(k, v) for k, v in headers.items() if k.lower() not in _OF_THE_CONNECTION]
    return CIMultiDict(kept)
