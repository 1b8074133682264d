"""One client's connection: what aiohttp answers by itself, before any route is known.

Bytes that are no HTTP never become a request, so no middleware sees them. They are answered here,
in the shape and with the headers of every other answer, and the connection is closed: nothing
after them can be read for certain (RFC 9112, sections 2.2 and 6.3).

aiohttp has no public place for this, so ``Connection`` and ``Runner`` touch four of its private
names (``_make_server``, ``_messages``, ``_current_request``, ``_ErrInfo``).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError, InvalidURLError
from aiohttp.web_protocol import _ErrInfo

from penstock.services.frontend.errors import ApiError, bad_request, status_error

MAX_REASON = 300
"""Characters that an answer repeats of what the parser says."""

ErrorResponse = Callable[[web.BaseRequest, ApiError], web.Response]
"""Renders an error for a request that may be none; called once for each."""


def drop_clients_faults(record: logging.LogRecord) -> bool:
    """No traceback for every stray byte that a client sends, nor for each that leaves."""
    error = record.exc_info[1] if record.exc_info else None
    faults = HttpProcessingError | web.RequestPayloadError | ConnectionError
    return not isinstance(error, faults)


_log = logging.getLogger("penstock.frontend.http")
_log.addFilter(drop_clients_faults)
_OPTIONS: dict[str, Any] = {"access_log": None, "logger": _log}
"""None switches the access log off; aiohttp's annotation does not know it."""


def malformed(error: BaseException | None) -> ApiError:
    """What the parser did not understand, in one printable line."""
    text = error.message if isinstance(error, HttpProcessingError) else ""
    if isinstance(error, InvalidURLError):  # its message is the URL alone
        text = f"Invalid URL: {text}"
    words = "".join(char if char.isprintable() else " " for char in text).strip(" ^").split()
    reason = " ".join(words).rstrip(":")[:MAX_REASON] or "it cannot be parsed"
    return bad_request(f"The request is not valid HTTP: {reason}", code="malformed_http")


class Connection(web.RequestHandler):
    """aiohttp's protocol; only its own errors look different."""

    __slots__ = ("_error_response",)

    def __init__(
        self, server: Server, loop: asyncio.AbstractEventLoop, error_response: ErrorResponse
    ) -> None:
        super().__init__(server, loop=loop, **_OPTIONS)
        self._error_response = error_response

    def data_received(self, data: bytes) -> None:
        """Take bytes. A body that turns out to be malformed fails in the hands of its reader.

        aiohttp would queue the error as an answer of its own behind that request, whose handler
        waits for the rest of the body until it times out.
        """
        super().data_received(data)
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

    def __init__(self, application: web.Server, error_response: ErrorResponse) -> None:
        super().__init__(
            application.request_handler,
            request_factory=application.request_factory,
            handler_cancellation=application.handler_cancellation,
        )
        self._error_response = error_response

    def __call__(self) -> Connection:
        return Connection(self, asyncio.get_running_loop(), self._error_response)


class Runner(web.AppRunner):
    """Runs an application on ``Connection``s."""

    def __init__(
        self, app: web.Application, error_response: ErrorResponse, *, shutdown_timeout: float
    ) -> None:
        """``shutdown_timeout`` in seconds: how long ``cleanup`` waits for handlers.

        A handler is cancelled when its client leaves.
        """
        super().__init__(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=shutdown_timeout
        )
        self._error_response = error_response

    async def _make_server(self) -> web.Server:
        """The one step of ``BaseRunner`` that its subclasses are to define."""
        return Server(await super()._make_server(), self._error_response)
