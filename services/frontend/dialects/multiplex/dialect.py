"""/v1/stream among the dialects."""

from __future__ import annotations

from typing import NoReturn

from aiohttp import web

from penstock.client.gateway_interface import ServedModel
from penstock.services.frontend.bodies.multiplex import ClientFrame, ServerFrame
from penstock.services.frontend.bodies.responses import ErrorBody
from penstock.services.frontend.bodies.routes import RouteBodies
from penstock.services.frontend.body import Pause
from penstock.services.frontend.dialects.interface import Endpoint
from penstock.services.frontend.dialects.multiplex.session import MultiplexSession
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.parse import GenerateRequest
from penstock.services.frontend.websockets.handshake import connected

PATH = "/v1/stream"


async def connect(request: web.Request) -> web.StreamResponse:
    """``GET /v1/stream``, to become a WebSocket."""
    return await connected(request, MultiplexSession)


class MultiplexDialect:
    """Its route has a handler of its own: what runs there is no request of HTTP's."""

    name = "multiplex"
    routes: tuple[str, ...] = ()
    endpoints: tuple[Endpoint, ...] = (("GET", PATH, connect),)
    bodies = (
        RouteBodies(
            "GET",
            PATH,
            summary="Several chats and completions at once on a WebSocket",
            group="Stream",
            upgrades=True,
            messages=(ClientFrame, ServerFrame),
            others={426: ErrorBody},
        ),
    )

    def parse(
        self, raw: bytes, models: list[ServedModel], pause: Pause | None = None
    ) -> GenerateRequest:
        raise _has_a_handler()

    def renderer(self, request: GenerateRequest, answer_id: str, created: int) -> NoReturn:
        raise _has_a_handler()

    def error(self, error: ApiError) -> bytes:
        return error.body()


def _has_a_handler() -> TypeError:
    return TypeError("/v1/stream has a handler of its own")
