"""One client's connection: what aiohttp answers by itself, before any route is known.

Bytes that are no HTTP never become a request, so no middleware sees them. They are answered here,
in the shape and with the headers of every other answer, and the connection is closed: nothing
after them can be read for certain (RFC 9112, sections 2.2 and 6.3).

So are those who keep a connection without saying anything: half a header, or one too many.

aiohttp has no public place for this, so ``Connection`` and ``Runner`` touch five of its private
names: ``_make_server``, ``_messages``, ``_waiter``, ``_current_request`` and ``_ErrInfo``. Any
release may change them, so ``pyproject.toml`` allows only those that were tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
import socket
import time
from collections.abc import Callable
from email.utils import formatdate
from typing import Any

import msgspec
from aiohttp import hdrs, web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError
from aiohttp.web_protocol import _ErrInfo

from penstock.services.frontend.errors import ApiError, bad_request, retry_after, status_error
from penstock.services.frontend.handshakes import AcceptingSite, Handshakes
from penstock.services.frontend.open_files import MAX_CONNECTIONS
from penstock.services.frontend.root_path import below
from penstock.services.frontend.tls import Certificates

MAX_REASON = 300
"""Characters that an answer repeats of what the parser says."""

ErrorResponse = Callable[[web.BaseRequest | None, ApiError], web.Response]
"""Renders an error for a request that may be none; called once for each."""


class ConnectionLimits(msgspec.Struct, frozen=True):
    """What a client may hold of a process without saying anything."""

    connections: int = MAX_CONNECTIONS
    header_s: float = 10.0
    """Seconds from a request's first byte, or the connection's opening, to the header's end. With
    TLS the handshake has as many of its own."""
    keep_alive_s: float = 75.0
    """Seconds between two requests."""


def drop_clients_faults(record: logging.LogRecord) -> bool:
    """No traceback for every stray byte that a client sends, nor for each that leaves."""
    error = record.exc_info[1] if record.exc_info else None
    faults = HttpProcessingError | web.RequestPayloadError | ConnectionError
    return not isinstance(error, faults)


_log = logging.getLogger("penstock.frontend.http")
_log.addFilter(drop_clients_faults)
_UNREAD_ENCODING = re.compile(r"Can not decode content-encoding: \w+ \((\w+)\)\. Please install")
"""What aiohttp says to clients of a package that is not installed here."""
_OPTIONS: dict[str, Any] = {"access_log": None, "logger": _log}
"""None switches the access log off; aiohttp's annotation does not know it."""


def malformed(error: BaseException | None) -> ApiError:
    """What the parser did not understand, in one printable line."""
    text = error.message if isinstance(error, HttpProcessingError) else ""
    if isinstance(error, InvalidURLError):  # its message is the URL alone
        text = f"Invalid URL: {text}"
    if unread := _UNREAD_ENCODING.match(text):
        text = f"Content-Encoding {unread[1]} is not read; send gzip, deflate or none"
    words = "".join(char if char.isprintable() else " " for char in text).strip(" ^").split()
    reason = " ".join(words).rstrip(":")[:MAX_REASON] or "it cannot be parsed"
    return bad_request(f"The request is not valid HTTP: {reason}", code="malformed_http")


def _bytes_of(response: web.Response) -> bytes:
    """An answer without aiohttp's machinery, which works only behind a whole header."""
    body = response.body if isinstance(response.body, bytes) else b""
    headers = {
        **response.headers,
        hdrs.CONTENT_LENGTH: str(len(body)),
        hdrs.CONNECTION: "close",
        hdrs.DATE: formatdate(time.time(), usegmt=True),
    }
    lines = [f"HTTP/1.1 {response.status} {response.reason}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join((*lines, "", "")).encode() + body


class Connection(web.RequestHandler):
    """aiohttp's protocol, with errors of our own and a limit on silence."""

    __slots__ = (
        "_error_response",
        "_has_begun",
        "_header_timer",
        "_limits",
        "_server",
        "on_bytes",
    )

    def __init__(
        self, server: Server, loop: asyncio.AbstractEventLoop, error_response: ErrorResponse
    ) -> None:
        super().__init__(
            server, loop=loop, keepalive_timeout=server.limits.keep_alive_s, **_OPTIONS
        )
        self._error_response = error_response
        self._server = server
        self._limits = server.limits
        self._header_timer: asyncio.TimerHandle | None = None
        self._has_begun = False
        self.on_bytes: Callable[[int], None] | None = None
        """Told of so many bytes that came, before anything is made of them. For connections that
        are HTTP no more: what waits there is in nobody's account."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._server.open += 1
        if self._server.is_full():
            self._turn_away(
                ApiError(
                    503,
                    f"This frontend has {self._limits.connections} connections open; try again "
                    "(--frontends, and the limit on open files, allow more)",
                    kind="overloaded_error",
                    headers=retry_after(1.0),
                )
            )
        else:
            self._await_header()

    def connection_lost(self, exc: BaseException | None) -> None:
        self._forget_header()
        self._server.open -= 1
        super().connection_lost(exc)

    def _await_header(self) -> None:
        loop = asyncio.get_running_loop()
        self._header_timer = loop.call_later(self._limits.header_s, self._header_is_late)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _header_is_late(self) -> None:
        self._header_timer = None
        if self._has_begun:
            seconds = self._limits.header_s
            message = f"The header of the request did not arrive within {seconds:g} s"
            self._turn_away(status_error(408, message))
        else:
            self.force_close()

    def _turn_away(self, error: ApiError) -> None:
        if self.transport is not None:
            self.transport.write(_bytes_of(self._error_response(None, error)))
        self.force_close()

    def data_received(self, data: bytes) -> None:
        """Take bytes. A body that turns out to be malformed fails in the hands of its reader.

        aiohttp would queue the error as an answer of its own behind that request, whose handler
        waits for the rest of the body until it times out.
        """
        if self.on_bytes is not None:
            self.on_bytes(len(data))
        super().data_received(data)
        self._has_begun = True
        if self._messages:
            self._forget_header()
        elif self._waiter is not None and self._header_timer is None:
            self._await_header()  # the beginning of a further request
        if not self._messages or not isinstance(fault := self._messages[-1][0], _ErrInfo):
            return
        if len(self._messages) > 1:
            body = self._messages[-2][1]
        elif self._current_request is not None:
            body = self._current_request.content
        else:
            return
        if not body.is_eof():
            body.set_exception(web.RequestPayloadError(malformed(fault.exc).message))
            self._messages.pop()
            self.close()  # after the answers that are due

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        """Raises ``ConnectionError`` where an answer has begun: it can only be cut then."""
        super().handle_error(request, status, exc, message)  # logs, and raises
        error = status_error(status, "Internal error") if status >= 500 else malformed(exc)
        response = self._error_response(request, error)
        response.force_close()
        return response


class Server(web.Server):
    """Makes a ``Connection`` for each client. Call it inside the event loop."""

    def __init__(
        self,
        application: web.Server,
        error_response: ErrorResponse,
        limits: ConnectionLimits,
        root_path: str,
        certificates: Certificates | None,
    ) -> None:
        super().__init__(
            application.request_handler,
            request_factory=below(root_path, application.request_factory),
            handler_cancellation=application.handler_cancellation,
        )
        self.limits = limits
        self.open = 0
        """Connections, but those that are shaking hands."""
        self.handshakes = None if certificates is None else Handshakes(self, certificates)
        """``None``: without TLS."""
        self._error_response = error_response
        self._taking: set[asyncio.Task[None]] = set()

    def is_full(self) -> bool:
        """Whether the newest connection is one too many."""
        return self.open > self.limits.connections

    async def take(self, connection: socket.socket) -> None:
        """Serve a connection that was accepted."""
        if self.handshakes is not None:
            self.handshakes.take(connection)
        else:
            await asyncio.get_running_loop().connect_accepted_socket(self, connection)

    def take_soon(self, connection: socket.socket) -> None:
        """The same, for whoever cannot wait for it."""
        task = asyncio.get_running_loop().create_task(self._taken(connection))
        self._taking.add(task)
        task.add_done_callback(self._taking.discard)

    async def _taken(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # its client is gone again
            await self.take(connection)

    def is_idle(self) -> bool:
        """Whether nobody is connected."""
        return not self.connections and not (self.handshakes and self.handshakes.count)

    async def shutdown(self, timeout: float | None = None) -> None:
        if self.handshakes is not None:
            await self.handshakes.end()
        await super().shutdown(timeout)

    def __call__(self) -> Connection:
        return Connection(self, asyncio.get_running_loop(), self._error_response)


class Runner(web.AppRunner):
    """Runs an application on ``Connection``s."""

    def __init__(
        self,
        app: web.Application,
        error_response: ErrorResponse,
        limits: ConnectionLimits,
        *,
        shutdown_timeout: float,
        root_path: str = "",
        certificates: Certificates | None = None,
    ) -> None:
        """``root_path``: see ``root_path.below``. ``shutdown_timeout`` in seconds: how long
        ``cleanup`` waits for handlers. ``certificates``: ``None`` for HTTP without TLS.

        A handler is cancelled when its client leaves.
        """
        super().__init__(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_timeout
        )
        self._error_response = error_response
        self._limits = limits
        self._root_path = root_path
        self._certificates = certificates

    async def listen(self, sock: socket.socket, *, backlog: int) -> None:
        """Serve on a bound socket. Call it after ``setup``."""
        server = self.server
        site: web.BaseSite
        if isinstance(server, Server) and server.handshakes is not None:
            site = AcceptingSite(self, sock, server.handshakes.take, backlog=backlog)
        elif isinstance(server, Server) and sock.family == socket.AF_UNIX:
            site = AcceptingSite(self, sock, server.take_soon, backlog=backlog)
        else:
            site = web.SockSite(self, sock, backlog=backlog)
        await site.start()

    async def _make_server(self) -> web.Server:
        """The one step of ``BaseRunner`` that its subclasses are to define."""
        application = await super()._make_server()
        return Server(
            application, self._error_response, self._limits, self._root_path, self._certificates
        )
