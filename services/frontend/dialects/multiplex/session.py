"""A connection of /v1/stream: requests that run side by side, each under its client's name."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import ClassVar, NamedTuple

from aiohttp import web

from penstock.protocol.shown_values import show
from penstock.services.frontend.body import Pause
from penstock.services.frontend.dialects.multiplex.encodings import (
    JSON,
    MSGPACK,
    Encoding,
    Members,
    id_of,
    members_of,
    type_of,
    wrong_type,
)
from penstock.services.frontend.dialects.multiplex.request import (
    LOGPROBS,
    Asked,
    MultiplexedRequest,
)
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.websockets.session import SocketSession
from penstock.services.frontend.websockets.socket import Socket

MAX_REQUESTS = 64
"""At once, on one connection."""


class _Running(NamedTuple):
    request: MultiplexedRequest
    task: asyncio.Task[None]


class MultiplexSession(SocketSession):
    """One connection."""

    route: ClassVar[str] = "/v1/stream"

    def __init__(
        self, request: web.Request, connection: web.WebSocketResponse, socket: Socket
    ) -> None:
        super().__init__(request, connection, socket)
        self._running: dict[str, _Running] = {}

    @property
    def is_busy(self) -> bool:
        return bool(self._running)

    def refuse_waiting(self, why: ApiError) -> None:
        """No request waits behind another."""

    def close(self) -> None:
        """End what runs."""
        for running in self._running.values():
            running.task.cancel()
        super().close()

    async def received(self, raw: bytes, *, is_text: bool) -> None:
        encoding = JSON if is_text else MSGPACK
        ends: str | None = None
        """The request that a refusal of this frame ends."""
        cancels = False
        try:
            members, name, kind = await self.beside(len(raw), partial(_head_of, raw, encoding))
            cancels = kind == "cancel"
            if cancels:
                self._cancel(name, members)
                return
            if name not in self._running:
                ends = name
            self._begin(self._asked(name, kind, members, encoding))
        except ApiError as error:
            if not cancels:
                self.refused(error)
            self.socket.write(encoding.error(error, ends))

    def _asked(self, name: str, kind: object, members: Members, encoding: Encoding) -> Asked:
        """Raises ``ApiError`` 400."""
        if name in self._running:
            raise bad_request(
                f"id is {show(name)}, under which a request of this connection runs; send another "
                "one, or wait for its end",
                param="id",
                code="duplicate_id",
            )
        if not isinstance(kind, str) or kind not in LOGPROBS:
            raise wrong_type(kind)
        if "body" not in members:
            raise bad_request("body is missing in the frame", param="body")
        return Asked(name, kind, members["body"], encoding)

    def _begin(self, asked: Asked) -> None:
        """Raises ``ApiError`` where nothing more may run."""
        if self.ends is not None:
            raise self.ends
        if len(self._running) >= MAX_REQUESTS:
            raise ApiError(
                429,
                f"{MAX_REQUESTS} requests run already, which is the limit of a connection; wait "
                "for one to end, or open another connection",
                kind="rate_limit_error",
                code="too_many_requests",
            )
        request = MultiplexedRequest(self, asked)
        task = asyncio.get_running_loop().create_task(request.answer())
        self._running[asked.name] = _Running(request, task)
        task.add_done_callback(lambda _: self._ended(asked.name))

    def _ended(self, name: str) -> None:
        self._running.pop(name).request.forget_body()
        self.close_if_idle()

    def _cancel(self, name: str, members: Members) -> None:
        """Raises ``ApiError`` 400."""
        if "body" in members:
            raise bad_request("body has no place in a frame of the type cancel", param="body")
        running = self._running.get(name)
        if running is None:
            raise bad_request(
                f"id is {show(name)}, under which nothing runs on this connection; its request has "
                "ended, or never was",
                param="id",
                code="unknown_id",
            )
        running.request.cancel()


def _head_of(raw: bytes, encoding: Encoding, pause: Pause | None) -> tuple[Members, str, object]:
    """The members of a frame, its name and its type. Raises ``ApiError``: 413, 400."""
    members = members_of(raw, encoding)
    return members, id_of(members, encoding), type_of(members, encoding)
