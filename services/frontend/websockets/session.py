"""A WebSocket from its first message to its end."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

from aiohttp import WSCloseCode, WSMsgType, web

from penstock.protocol.trace_context import trace_id
from penstock.services.frontend.body import Pause
from penstock.services.frontend.context import CONTEXT, KEY, REQUEST_ID, TENANT, TRACE
from penstock.services.frontend.dialect_handler import caller_of
from penstock.services.frontend.errors import ApiError, shutting_down
from penstock.services.frontend.generation import Generation
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.request_body import beside
from penstock.services.frontend.request_log import CLIENT_GONE, log_request
from penstock.services.frontend.websockets.socket import Socket

Found = TypeVar("Found")
MAX_REASON_BYTES = 100
"""Of what a close frame says; it holds 123 at most."""
IDLE_SECONDS = 600.0
"""More than the 75 s of HTTP: a client opens a WebSocket to keep it, and sees when it closes."""
LIMIT_SECONDS = 3600.0
LIMIT_REACHED = "websocket_connection_limit_reached"


class SocketSession(ABC):
    """One connection, on which requests begin and end.

    It ends when its client leaves, once nothing runs after ``end`` or ``drain``, when it has been
    idle for too long, and when it has been open for too long.
    """

    route: ClassVar[str]
    """For the log and the metrics."""
    idle_s: ClassVar[float | None] = IDLE_SECONDS
    """Seconds without a message and without a request, after which it is closed; ``None``: they
    do not matter."""

    def __init__(
        self, request: web.Request, connection: web.WebSocketResponse, socket: Socket
    ) -> None:
        self.request = request
        self.socket = socket
        self.context = request.app[CONTEXT]
        self.owner = request[TENANT]
        self.ends: ApiError | None = None
        """Why no new request is taken."""
        self._connection = connection
        self._close_code = WSCloseCode.OK
        self._closing: asyncio.Task[Any] | None = None
        self._requests = 0
        self._loop = asyncio.get_running_loop()
        self._active_at = self._loop.time()
        """When a message came, or a request ended."""
        self._idle_timer: asyncio.TimerHandle | None = None
        if self.idle_s is not None:
            self._close_when_unused(self.idle_s, self.idle_s)
        self._limit_timer = self._loop.call_later(self.limit_s, self.reached_limit)

    # --- what a protocol says

    @property
    def limit_s(self) -> float:
        """Seconds for which it may be open. What runs then may end."""
        return LIMIT_SECONDS

    def reached_limit(self) -> None:
        """It has been open for that long."""
        why = f"A WebSocket is open for {self.limit_s / 60:g} minutes at most; connect again"
        self.end(ApiError(408, why, code=LIMIT_REACHED), WSCloseCode.GOING_AWAY)

    @property
    @abstractmethod
    def is_busy(self) -> bool:
        """Whether a request waits or runs."""

    @abstractmethod
    async def received(self, raw: bytes, *, is_text: bool) -> None:
        """Take a message. The next one is read when it returns."""

    @abstractmethod
    def refuse_waiting(self, why: ApiError) -> None:
        """End the requests that wait behind others."""

    # --- the connection

    async def run(self) -> None:
        """Read until the client or the server closes."""
        async for message in self._connection:
            if message.type is WSMsgType.TEXT or message.type is WSMsgType.BINARY:
                self._active_at = self._loop.time()
                is_text = message.type is WSMsgType.TEXT
                raw = message.data.encode() if is_text else message.data
                self.socket.read(len(raw))
                await self.received(raw, is_text=is_text)
            await self.socket.writable()

    def close(self) -> None:
        """The connection is gone."""
        if self._idle_timer is not None:
            self._idle_timer.cancel()
        self._limit_timer.cancel()
        self.socket.close()

    def drain(self) -> None:
        """The server goes down: what runs may end, nothing new begins."""
        self.end(shutting_down(), WSCloseCode.GOING_AWAY)

    def end(self, why: ApiError, code: WSCloseCode = WSCloseCode.OK) -> None:
        """Take no new request, and close when nothing runs. code: of the close frame."""
        self.ends, self._close_code = why, code
        self.refuse_waiting(why)
        self.close_if_idle()

    def close_if_idle(self) -> None:
        """Call it whenever a request has ended."""
        self._active_at = self._loop.time()
        if self.ends is None or self.is_busy or self._closing is not None:
            return
        reason = self.ends.message[:MAX_REASON_BYTES].encode()
        closing = self._connection.close(code=self._close_code, message=reason)
        self._closing = self._loop.create_task(closing)

    def _close_when_unused(self, idle_s: float, rest_s: float) -> None:
        self._idle_timer = self._loop.call_later(rest_s, self._close_if_unused, idle_s)

    def _close_if_unused(self, idle_s: float) -> None:
        rest_s = idle_s
        if not self.is_busy and not self.socket.is_receiving:
            rest_s -= self._loop.time() - self._active_at
        if rest_s > 0:
            self._close_when_unused(idle_s, rest_s)
            return
        self.end(
            ApiError(
                408,
                f"Nothing was asked for {idle_s:g} s, the limit of a WebSocket; connect again",
                code="websocket_idle",
            )
        )

    async def beside(self, size: int, read: Callable[[Pause | None], Found]) -> Found:
        """What ``read`` makes of a message of so many bytes, as of a body of HTTP."""
        return await beside(self.context, size, read)

    # --- its requests

    def next_request_id(self) -> str:
        """The id of a further request, in every process's log."""
        self._requests += 1
        return f"{self.request[REQUEST_ID]}-{self._requests}"

    def generation(self, asked: GenerateRequest, request_id: str, arrival: float) -> Generation:
        """The life of a request; close it whatever happens."""
        return Generation(
            self.context.gateway,
            self.context.meters,
            asked,
            caller=caller_of(self.request, request_id),
            key=self.request[KEY],
            gate=self.context.gate,
            timeout_s=self.context.config.request_timeout_s,
            arrival=arrival,
            now=self.context.clock.now,
        )

    def answered(self, request_id: str, generation: Generation | None) -> None:
        """A request got its whole answer, or one that ended with an error."""
        self._record_end(request_id, 200, "", generation)

    def refused(
        self, error: ApiError, request_id: str = "", generation: Generation | None = None
    ) -> None:
        """A request got an error before its answer began. request_id: empty where it got none."""
        code = error.code or error.kind
        self._record_end(request_id or self.next_request_id(), error.status, code, generation)

    def abandoned(self, request_id: str = "", generation: Generation | None = None) -> None:
        """The client left before a request was answered."""
        self._record_end(request_id or self.next_request_id(), CLIENT_GONE, "", generation)

    def _record_end(
        self, request_id: str, status: int, error: str, generation: Generation | None
    ) -> None:
        """Count a request that has ended, and write its line. status: that of HTTP."""
        self.context.registry.inc("http_requests_total", self.route, str(status))
        trace = trace_id(self.request[TRACE])
        log_request(request_id, self.route, status, error, generation, trace)
