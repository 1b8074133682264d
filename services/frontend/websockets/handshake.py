"""How a request becomes a WebSocket."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import WSCloseCode, web

from penstock.protocol.trace_context import line_fields
from penstock.services.frontend.access import SUBPROTOCOL
from penstock.services.frontend.body import too_large
from penstock.services.frontend.connection import Connection
from penstock.services.frontend.context import CONTEXT, REQUEST_ID, TRACE
from penstock.services.frontend.errors import ApiError, shutting_down
from penstock.services.frontend.websockets.session import SocketSession
from penstock.services.frontend.websockets.socket import Socket

CLOSE_SECONDS = 2.0
"""Time for the client to answer when a WebSocket is closed."""

logging.getLogger("aiohttp.websocket").setLevel(logging.ERROR)
"""Its warnings repeat what a client offers, which may be a key."""

MakeSession = Callable[[web.Request, web.WebSocketResponse, Socket], SocketSession]


class _Handshaken(web.WebSocketResponse):
    """aiohttp's WebSocket, which says why it closes on a message that is too large."""

    def __init__(self, max_bytes: int) -> None:
        super().__init__(
            timeout=CLOSE_SECONDS,
            protocols=(SUBPROTOCOL,),
            max_msg_size=max_bytes,
            compress=False,
        )
        self._max_bytes = max_bytes
        self.is_message_too_large = False
        """Whether it closes for that reason."""

    async def close(
        self, *, code: int = WSCloseCode.OK, message: bytes = b"", drain: bool = True
    ) -> bool:
        if code == WSCloseCode.MESSAGE_TOO_BIG and not message:
            self.is_message_too_large = True
            message = b"A message has at most %d bytes (--max-body-bytes)" % self._max_bytes
        return await super().close(code=code, message=message, drain=drain)


async def connected(
    request: web.Request, make: MakeSession, *, instead: str = ""
) -> web.WebSocketResponse:
    """Shake hands, and run a session until its end.

    instead: what one may ask for without a WebSocket. Raises ``ApiError``: 426 for a request that
    asks for none, 503 where the server goes down.
    """
    context = request.app[CONTEXT]
    connection = _Handshaken(context.config.max_body_bytes)
    if not connection.can_prepare(request):
        raise ApiError(
            426,
            f"GET {request.path} is for WebSockets: send the headers of RFC 6455 (Upgrade: "
            f"websocket){instead}",
            headers={"Upgrade": "websocket"},
        )
    if context.gateway.draining():
        raise shutting_down()
    protocol = request.protocol
    await connection.prepare(request)
    if not isinstance(protocol, Connection):
        raise TypeError("a WebSocket needs a connection of this server")
    fields = line_fields(request[REQUEST_ID], request[TRACE])
    socket = Socket(protocol, context.bodies, context.clock.stall_s, fields)
    session = make(request, connection, socket)
    with context.sockets.entered(session):
        if context.gateway.draining():  # since it was asked above
            session.drain()
        try:
            await session.run()
        finally:
            if connection.is_message_too_large:
                session.refused(too_large(context.config.max_body_bytes))
            session.close()
    return connection
