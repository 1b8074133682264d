"""A WebSocket of the Responses API: lanes of requests, what they continue, and steering.

https://developers.openai.com/api/docs/guides/websocket-mode. A client sends ``response.create``,
with the body of ``POST /v1/responses``, and gets the events of its response. Requests of one lane
(``stream_id``) follow each other, lanes run at once. The connection remembers its responses, stored
or not. ``response.steer`` adds a user's message to a response that runs: it ends where that can be
done, and another one continues it with the message.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections import deque
from typing import Any

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web

from penstock.client.gateway_interface import Overloaded
from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.openai_responses import ResponseCreate, ResponseSteer
from penstock.services.frontend.body import decode_body, no_pause
from penstock.services.frontend.context import CONTEXT, REQUEST_ID, TENANT
from penstock.services.frontend.dialect_handler import parsed
from penstock.services.frontend.dialects.responses.conversations import Conversations
from penstock.services.frontend.dialects.responses.events import EventWriter
from penstock.services.frontend.dialects.responses.lane_turn import LaneTurn
from penstock.services.frontend.dialects.responses.socket import Socket
from penstock.services.frontend.dialects.responses.state import ResponsesState
from penstock.services.frontend.dialects.responses.steering import (
    Steering,
    failed_steer,
    steer_of,
)
from penstock.services.frontend.errors import ApiError, bad_request, from_rejected, status_error

_log = logging.getLogger("penstock.frontend")

MAX_LANES = 32
MAX_WAITING = 64
"""Requests that wait in all lanes of a connection."""
LIMIT_REACHED = "websocket_connection_limit_reached"


class _Head(msgspec.Struct):
    """What is looked at before a message is read."""

    type: Any = None
    stream_id: Any = None


class _Lane:
    def __init__(self) -> None:
        self.waiting: deque[tuple[ResponseCreate, int]] = deque()
        """Requests with their sizes in bytes."""
        self.task: asyncio.Task[None] | None = None


class Session:
    """One connection."""

    def __init__(
        self,
        request: web.Request,
        connection: web.WebSocketResponse,
        socket: Socket,
        state: ResponsesState,
        *,
        limit_s: float,
    ) -> None:
        self.request = request
        self.socket = socket
        self.state = state
        self.context = request.app[CONTEXT]
        self.owner = request[TENANT]
        self.name = uuid.uuid4().hex
        """What it remembers is kept under this name."""
        self.conversations = Conversations(self.owner, state.store, state.local, self.name)
        self.steering = Steering()
        self.remembered: list[str] = []
        self.turns = 0
        self._connection = connection
        self._lanes: dict[str | None, _Lane] = {}
        self._waiting = 0
        self.ends: ApiError | None = None
        """Why no new request is taken."""
        self._limit_s = limit_s
        self._limit = asyncio.get_running_loop().call_later(limit_s, self._on_limit)
        self._closing: asyncio.Task[Any] | None = None

    async def run(self) -> None:
        """Read until the client or the server closes."""
        async for message in self._connection:
            if message.type is WSMsgType.TEXT:
                raw = message.data.encode()
                self.socket.read(len(raw))
                await self._received(raw)
            elif message.type is WSMsgType.BINARY:
                self.socket.read(len(message.data))
                self.tell_error(bad_request("A message is binary; text is allowed"), None)
            await self.socket.writable()

    def close(self) -> None:
        """The connection is gone: end what runs, forget what it knew."""
        self._limit.cancel()
        for lane in self._lanes.values():
            self._forget_waiting(lane)
            if lane.task is not None:
                lane.task.cancel()
        for name in self.remembered:
            self.state.local.drop(self.name, name)
        self.socket.close()

    def drain(self) -> None:
        """The server goes down: what runs may end, nothing new begins."""
        self._end(
            ApiError(
                503,
                "The server is shutting down; connect again",
                kind="overloaded_error",
                code="server_shutting_down",
            )
        )

    def _on_limit(self) -> None:
        minutes = self._limit_s / 60
        error = ApiError(
            400,
            f"Responses websocket connection limit reached ({minutes:g} minutes). Create a new "
            "websocket connection to continue.",
            code=LIMIT_REACHED,
        )
        self.tell_error(error, None)
        self._end(error)

    def _end(self, why: ApiError) -> None:
        self.ends = why
        for name, lane in self._lanes.items():
            for _ in range(len(lane.waiting)):
                self.tell_error(why, name)
            self._forget_waiting(lane)
        self._close_if_idle()

    def _close_if_idle(self) -> None:
        if self.ends is None or self._lanes or self._closing is not None:
            return
        goes_down = self.ends.status == 503
        code = WSCloseCode.GOING_AWAY if goes_down else WSCloseCode.OK
        closing = self._connection.close(code=code, message=self.ends.message[:100].encode())
        self._closing = asyncio.get_running_loop().create_task(closing)

    # --- what is told

    def tell_error(self, error: ApiError, lane: str | None) -> None:
        """An error that belongs to no response."""
        self.socket.write(EventWriter(is_socket=True, lane=lane).error(error))

    # --- what comes

    async def _received(self, raw: bytes) -> None:
        lane: str | None = None
        try:
            head = msgspec.json.decode(raw, type=_Head)
            if isinstance(head.stream_id, str):
                lane = head.stream_id[:64]
            if head.type == "response.create":
                await self._create(raw)
            elif head.type == "response.steer":
                self._steer(raw)
            else:
                raise bad_request(
                    f"type is {show(head.type)}; 'response.create' or 'response.steer' is allowed",
                    "type",
                )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            said = f"The message is not a JSON object: {str(error)[:200]}"
            self.tell_error(bad_request(said), lane)
        except ApiError as error:
            self.tell_error(error, lane)
        except Overloaded as overloaded:
            self.tell_error(from_rejected(overloaded.rejected), lane)

    async def _create(self, raw: bytes) -> None:
        if self.ends is not None:
            raise self.ends
        body = await parsed(
            self.context,
            len(raw),
            lambda models, pause: decode_body(raw, ResponseCreate, pause or no_pause),
        )
        lane = self._lanes.get(body.stream_id)
        if lane is None and len(self._lanes) >= MAX_LANES:
            raise _too_many(f"{MAX_LANES} lanes run already, which is the limit")
        if self._waiting >= MAX_WAITING:
            raise _too_many(f"{MAX_WAITING} requests wait already, which is the limit")
        self.context.bodies.take(len(raw))
        self._waiting += 1
        if lane is None:
            lane = self._lanes[body.stream_id] = _Lane()
            lane.waiting.append((body, len(raw)))
            lane.task = asyncio.get_running_loop().create_task(self._run(body.stream_id, lane))
        else:
            lane.waiting.append((body, len(raw)))

    async def _run(self, name: str | None, lane: _Lane) -> None:
        """Answer the requests of a lane, one after another."""
        try:
            while lane.waiting:
                body, size = lane.waiting.popleft()
                try:
                    await LaneTurn(self, body, size).answer()
                finally:
                    self._taken(size)
        except ConnectionError:
            pass
        except Exception:
            _log.exception("a request failed", extra={"id": self.request[REQUEST_ID]})
            message = f"Internal error in request {self.request[REQUEST_ID]}"
            self.tell_error(status_error(500, message), name)
        finally:
            self._forget_waiting(lane)
            if self._lanes.get(name) is lane:
                del self._lanes[name]
            self._close_if_idle()

    def _taken(self, size: int) -> None:
        self._waiting -= 1
        self.context.bodies.used -= size

    def _forget_waiting(self, lane: _Lane) -> None:
        while lane.waiting:
            _, size = lane.waiting.popleft()
            self._taken(size)

    def _steer(self, raw: bytes) -> None:
        try:
            body = decode_body(raw, ResponseSteer)
        except ApiError as error:
            self.socket.write(failed_steer(raw, "invalid_input", error.message))
            return
        running = self.steering.running.get(body.previous_response_id)
        if running is None:
            is_known = self._knows(body.previous_response_id)
            code = "response_already_completed" if is_known else "response_not_found"
            said = "has ended" if is_known else "is not running on this connection"
            message = f"Response {show(body.previous_response_id)} {said}"
            self.socket.write(failed_steer(raw, code, message))
            return
        running.steer(steer_of(body), raw)

    def _knows(self, name: str) -> bool:
        is_ending = (self.owner, name) in self.state.running
        return is_ending or self.state.local.find(self.name, name) is not None

    @property
    def request_id(self) -> str:
        """Of the next turn, for the log."""
        self.turns += 1
        return f"{self.request[REQUEST_ID]}-{self.turns}"


def _too_many(what: str) -> ApiError:
    return ApiError(
        429,
        f"{what} of a connection; wait for a response to end, or open another connection",
        kind="rate_limit_error",
        code="websocket_queue_full",
    )
