"""A WebSocket of the Responses API: lanes of requests, what they continue, and steering.

https://developers.openai.com/api/docs/guides/websocket-mode. A client sends ``response.create``,
with the body of ``POST /v1/responses``, and gets the events of its response. Requests of one lane
(``stream_id``) follow each other, lanes run at once. The connection remembers its responses, stored
or not. ``response.steer`` adds a user's message to a response that runs: it ends where that can be
done, and another one continues it with the message.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from typing import Any, ClassVar

import msgspec
from aiohttp import web

from penstock.client.gateway_interface import Overloaded
from penstock.protocol.shown_values import show
from penstock.services.frontend.bodies.openai_responses import ResponseCreate, ResponseSteer
from penstock.services.frontend.body import decode_body, no_pause
from penstock.services.frontend.context import KEY
from penstock.services.frontend.dialect_handler import parsed
from penstock.services.frontend.dialects.responses.conversations import Conversations
from penstock.services.frontend.dialects.responses.events import EventWriter
from penstock.services.frontend.dialects.responses.lane_turn import LaneTurn
from penstock.services.frontend.dialects.responses.state import RESPONSES
from penstock.services.frontend.dialects.responses.steering import (
    Steering,
    failed_steer,
    steer_of,
)
from penstock.services.frontend.errors import ApiError, bad_request, from_rejected
from penstock.services.frontend.websockets.messages import text_messages
from penstock.services.frontend.websockets.session import LIMIT_REACHED, SocketSession
from penstock.services.frontend.websockets.socket import Socket

MAX_LANES = 32
MAX_WAITING = 64
"""Requests that wait in all lanes of a connection."""


class _Head(msgspec.Struct):
    """What is looked at before a message is read."""

    type: Any = None
    stream_id: Any = None


class _Lane:
    def __init__(self) -> None:
        self.waiting: deque[tuple[ResponseCreate, int]] = deque()
        """Requests with their sizes in bytes."""
        self.task: asyncio.Task[None] | None = None


class Session(SocketSession):
    """One connection."""

    route: ClassVar[str] = "/v1/responses"
    idle_s: ClassVar[float | None] = None
    """A client keeps one, and what it remembers, while its user thinks: its own limit ends it."""

    def __init__(
        self, request: web.Request, connection: web.WebSocketResponse, socket: Socket
    ) -> None:
        super().__init__(request, connection, socket)
        self.state = request.app[RESPONSES]
        self.name = uuid.uuid4().hex
        """What it remembers is kept under this name."""
        self.conversations = Conversations(
            self.owner, self.state.store, self.state.local, self.name
        )
        self.steering = Steering()
        self.remembered: list[str] = []
        self._lanes: dict[str | None, _Lane] = {}
        self._waiting = 0

    @property
    def is_busy(self) -> bool:
        return bool(self._lanes)

    def close(self) -> None:
        """End what runs, forget what the connection knew."""
        for lane in self._lanes.values():
            self._abandon_waiting(lane)
            if lane.task is not None:
                lane.task.cancel()
        for name in self.remembered:
            self.state.local.drop(self.name, name)
        super().close()

    @property
    def limit_s(self) -> float:
        return self.request.app[RESPONSES].limit_s

    def reached_limit(self) -> None:
        minutes = self.limit_s / 60
        error = ApiError(
            400,
            f"Responses websocket connection limit reached ({minutes:g} minutes). Create a new "
            "websocket connection to continue.",
            code=LIMIT_REACHED,
        )
        self.tell_error(error, None)
        self.end(error)

    def refuse_waiting(self, why: ApiError) -> None:
        for name, lane in self._lanes.items():
            for _ in lane.waiting:
                self._refuse(why, name)
            self._forget_waiting(lane)

    # --- what is told

    def tell(self, lines: bytes) -> None:
        """Send events at once."""
        self.socket.write(text_messages(lines))

    def tell_error(self, error: ApiError, lane: str | None) -> None:
        """An error that belongs to no response."""
        self.tell(EventWriter(is_socket=True, lane=lane).error(error))

    # --- what comes

    async def received(self, raw: bytes, *, is_text: bool) -> None:
        lane: str | None = None
        try:
            if not is_text:
                raise bad_request("A message is binary; text is allowed")
            head = await self.beside(len(raw), lambda _: msgspec.json.decode(raw, type=_Head))
            if isinstance(head.stream_id, str):
                lane = head.stream_id[:64]
            if head.type == "response.create":
                await self._create(raw)
            elif head.type == "response.steer":
                await self._steer(raw)
            else:
                raise bad_request(
                    f"type is {show(head.type)}; 'response.create' or 'response.steer' is allowed",
                    "type",
                )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            said = f"The message is not a JSON object: {str(error)[:200]}"
            self._refuse(bad_request(said), lane)
        except ApiError as error:
            self._refuse(error, lane)
        except Overloaded as overloaded:
            self._refuse(from_rejected(overloaded.rejected), lane)

    def _refuse(self, error: ApiError, lane: str | None) -> None:
        """End a request that has not begun."""
        self.refused(error)
        self.tell_error(error, lane)

    async def _create(self, raw: bytes) -> None:
        if self.ends is not None:
            raise self.ends
        body = await parsed(
            self.context,
            self.request[KEY],
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
        finally:
            self._abandon_waiting(lane)
            if self._lanes.get(name) is lane:
                del self._lanes[name]
            self.close_if_idle()

    def _taken(self, size: int) -> None:
        self._waiting -= 1
        self.context.bodies.used -= size

    def _abandon_waiting(self, lane: _Lane) -> None:
        """Its client has gone."""
        for _ in lane.waiting:
            self.abandoned()
        self._forget_waiting(lane)

    def _forget_waiting(self, lane: _Lane) -> None:
        while lane.waiting:
            _, size = lane.waiting.popleft()
            self._taken(size)

    async def _steer(self, raw: bytes) -> None:
        try:
            body = await self.beside(
                len(raw), lambda pause: decode_body(raw, ResponseSteer, pause or no_pause)
            )
        except ApiError as error:
            await self._fail_steer(raw, "invalid_input", error.message)
            return
        running = self.steering.running.get(body.previous_response_id)
        if running is None:
            is_known = self._knows(body.previous_response_id)
            code = "response_already_completed" if is_known else "response_not_found"
            said = "has ended" if is_known else "is not running on this connection"
            message = f"Response {show(body.previous_response_id)} {said}"
            await self._fail_steer(raw, code, message)
            return
        refused = self.steering.refusal(running, len(raw))
        if refused is None:
            running.steer(steer_of(body), raw)
        else:
            await self._fail_steer(raw, *refused, lane=running.lane)

    async def _fail_steer(
        self, raw: bytes, code: str, message: str, lane: str | None = None
    ) -> None:
        writer = EventWriter(is_socket=True, lane=lane)
        told = await self.beside(
            len(raw), lambda _: text_messages(failed_steer(raw, code, message, writer=writer))
        )
        self.socket.write(told)

    def _knows(self, name: str) -> bool:
        is_ending = (self.owner, name) in self.state.running
        return is_ending or self.state.local.find(self.name, name) is not None


def _too_many(what: str) -> ApiError:
    return ApiError(
        429,
        f"{what} of a connection; wait for a response to end, or open another connection",
        kind="rate_limit_error",
        code="websocket_queue_full",
    )
