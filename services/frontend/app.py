"""Puts the HTTP side together: routes, and the rules that hold on every route."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping, Sequence
from itertools import takewhile

from aiohttp import HttpVersion11, hdrs, web
from aiohttp.typedefs import Handler

from penstock.client.gateway_interface import Gateway, Overloaded
from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.shown_values import show
from penstock.protocol.trace_context import line_fields, trace_id
from penstock.services.frontend import access, api_page, dialect_handler, playground, system
from penstock.services.frontend.body import check_is_json
from penstock.services.frontend.connection import ConnectionLimits, Runner
from penstock.services.frontend.context import CONTEXT, KEY, REQUEST_ID, TENANT, TRACE, Context
from penstock.services.frontend.dialects.anthropic.headers import VERSION_HEADER
from penstock.services.frontend.dialects.anthropic.messages import MESSAGES
from penstock.services.frontend.dialects.interface import Dialect, endpoints_of
from penstock.services.frontend.dialects.registry import BUILT_IN
from penstock.services.frontend.dialects.responses.state import RESPONSES, ResponsesState
from penstock.services.frontend.errors import ApiError, from_rejected, status_error
from penstock.services.frontend.keys.known_key import ANYBODY, KnownKey, Right
from penstock.services.frontend.keys.standing import utc_now
from penstock.services.frontend.request_log import (
    CLIENT_GONE,
    ERROR_KIND,
    GENERATION,
    log_request,
)
from penstock.services.frontend.requests import adapter_routes, model_routes, sleep_routes
from penstock.services.frontend.requests import routes as request_routes
from penstock.services.frontend.stream import STALL_S
from penstock.services.frontend.tls import Certificates

BACKLOG = 1024
SHUTDOWN_TIMEOUT_S = 1.0
"""How long ``AppRunner.cleanup`` waits for handlers; draining comes before it."""

_ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("GET", "/v1/models", system.list_models),
    ("GET", "/v1/models/{model:.+}", system.show_model),
    ("GET", "/live", system.live),
    ("GET", "/health", system.ready),
    ("GET", "/ready", system.ready),
    ("GET", "/metrics", system.show_metrics),
    ("GET", "/version", system.version),
    *api_page.ROUTES,
    *request_routes.ROUTES,
    *model_routes.ROUTES,
    *adapter_routes.ROUTES,
    *sleep_routes.ROUTES,
    *playground.ROUTES,
)
OPEN_ROUTES = (
    frozenset({"/live", "/health", "/ready"}) | api_page.OPEN_ROUTES | playground.OPEN_ROUTES
)
"""Routes that need no API key: probes have none, and pages ask for one."""
RIGHTS: Mapping[str, Right] = {
    "/metrics": "metrics",
    "/version": "any",
    "other": "any",
    **request_routes.RIGHTS,
    **model_routes.RIGHTS,
    **adapter_routes.RIGHTS,
    **sleep_routes.RIGHTS,
}
"""What a route asks of a key; all others are for the role user."""
_OF_ANY_NAME = frozenset({"/v1/models/{model}", "/v1/admin/models/{model}"})
"""As aiohttp writes paths whose declaration allows a slash within a name."""
_NAMES_OF_OTHERS = {"embed": "/v1/embeddings", "embeddings": "/v1/embeddings"}
"""What ends the path of a route at another server (Cohere, Ollama, text-embeddings-inference)."""
LONGEST_PATH = 256
"""Characters of an unknown path that are looked at, to find the one that is meant."""
_PATHS = web.AppKey("paths", frozenset[str])

_log = logging.getLogger("penstock.frontend")


def routes(dialects: Sequence[Dialect]) -> list[tuple[str, str, Handler]]:
    """(method, path, handler) of everything that is served."""
    generating: list[tuple[str, str, Handler]] = [
        ("POST", path, dialect_handler.handler(dialect))
        for dialect in dialects
        for path in dialect.routes
    ]
    others = [endpoint for dialect in dialects for endpoint in endpoints_of(dialect)]
    return [*generating, *others, *_ROUTES]


def route_of(request: web.Request) -> str:
    """The declared path that a request was routed to, or ``other``. Never the client's text."""
    resource = request.match_info.route.resource
    path = "" if resource is None else resource.canonical
    found = path.replace("{model}", "{model:.+}") if path in _OF_ANY_NAME else path
    return found if found in request.app[_PATHS] else "other"


def _error_response(error: ApiError, dialect: Dialect | None = None) -> web.Response:
    """In the words of the dialect, if the route is one's."""
    return web.Response(
        status=error.status,
        body=error.body() if dialect is None else dialect.error(error),
        content_type="application/json",
        headers=error.headers,
    )


def _meant(request: web.Request) -> str:
    """The path that a base URL without its ``/v1``, with two of them or with a slash too many has
    missed, or that stands for another server's; empty: there is none."""
    parts = [part for part in request.path[:LONGEST_PATH].split("/") if part]
    rest = parts[sum(1 for part in takewhile("v1".__eq__, parts)) :]
    for path in ("/" + "/".join(rest), "/v1/" + "/".join(rest)):
        if rest and path in request.app[_PATHS]:
            return path
    return _NAMES_OF_OTHERS.get(rest[-1], "") if rest else ""


def _from_http(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own refusals in our shape."""
    where = f"{show(request.method)[1:-1]} {show(request.path)[1:-1]}"
    if error.status == 404:
        meant = _meant(request)
        found = status_error(404, f"There is no {where}" + (f"; there is {meant}" if meant else ""))
    elif error.status == 405:
        found = status_error(405, f"There is no {where}; allowed: {error.headers['Allow']}")
        found.headers = {"Allow": error.headers["Allow"]}
    else:
        found = status_error(error.status, error.reason)
    return found


async def _answer(request: web.Request, handler: Handler) -> web.StreamResponse:
    """The handler's answer, or its error as an answer."""
    try:
        context = request.app[CONTEXT]
        context.browsers.check(request)
        if context.browsers.answers_preflight(request):
            return web.Response(status=204)
        request[KEY] = _key_of(request)
        request[TENANT] = request[KEY].tenant
        if request.method == hdrs.METH_POST and request.match_info.http_exception is None:
            check_is_json(request)
        return await handler(request)
    except ApiError as error:
        # It holds the request, which holds it: the body's memory would wait for the collector.
        error.__traceback__ = None
        return _refusal(request, error)
    except Overloaded as overloaded:
        return _refusal(request, from_rejected(overloaded.rejected))
    except web.HTTPException as error:
        return _refusal(request, _from_http(request, error))
    except ConnectionError:
        raise
    except Exception:
        error_id = request[REQUEST_ID]
        _log.exception("a request failed", extra=line_fields(error_id, request[TRACE]))
        return _refusal(request, status_error(500, f"Internal error in request {error_id}"))


def _key_of(request: web.Request) -> KnownKey:
    """Who calls, where the route is not for everybody. Raises ``ApiError``: 401, 403."""
    route = route_of(request)
    if route in OPEN_ROUTES:
        return ANYBODY
    key = request.app[CONTEXT].keys.of_request(request)
    key.check_right(RIGHTS.get(route, "user"))
    return key


def _refusal(request: web.Request, error: ApiError) -> web.Response:
    request[ERROR_KIND] = error.code or error.kind
    error.request_id = request[REQUEST_ID]
    return _error_response(error, _dialect_of(request))


def _dialect_of(request: web.Request) -> Dialect | None:
    """Whose words an error is told in: the route's, else those that the client's headers speak."""
    dialects = request.app[CONTEXT].dialects
    spoken = MESSAGES if VERSION_HEADER in request.headers else ""
    return dialects.get(route_of(request)) or dialects.get(spoken)


@web.middleware
async def every_request(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Access, errors, counting and the log, on every route and on none."""
    request[REQUEST_ID] = access.request_id(request)
    request[TRACE] = access.traceparent(request)
    status = CLIENT_GONE
    request.app[CONTEXT].active += 1
    try:
        response = await _answer(request, handler)
        status = response.status
        return response
    finally:
        request.app[CONTEXT].active -= 1
        route = route_of(request)
        request.app[CONTEXT].registry.inc("http_requests_total", route, str(status))
        log_request(
            request[REQUEST_ID],
            route,
            status,
            request.get(ERROR_KIND, ""),
            request.get(GENERATION),
            trace_id(request[TRACE]),
        )


def _stamp(response: web.StreamResponse, request_id: str) -> None:
    """The headers of every answer."""
    headers = response.headers
    headers["x-request-id"] = headers["request-id"] = request_id
    headers[hdrs.SERVER] = "penstock"
    headers["X-Content-Type-Options"] = "nosniff"


async def _on_prepare(request: web.Request, response: web.StreamResponse) -> None:
    """Runs just before the headers are written."""
    # aiohttp answers an unknown path with an Expect header before any middleware runs.
    _stamp(response, request.get(REQUEST_ID) or access.request_id(request))
    request.app[CONTEXT].browsers.stamp(request, response)
    generation = request.get(GENERATION)
    if generation is not None and generation.standing is not None:
        anthropic = _dialect_of(request) is request.app[CONTEXT].dialects.get(MESSAGES)
        response.headers.update(generation.standing.headers(utc_now(), anthropic=anthropic))
    if request.headers.get(hdrs.UPGRADE, "").lower() == "websocket":
        response.force_close()  # aiohttp reads no further request on this connection
    if request.app[CONTEXT].gateway.draining():
        response.force_close()
        response.headers[hdrs.CONNECTION] = "close"


async def _on_startup(app: web.Application) -> None:
    app[RESPONSES].begin()
    if (table := app[CONTEXT].keys.table) is not None:
        table.begin()
    if (shared := app[CONTEXT].limits.shared) is not None:
        shared.begin()


async def _on_cleanup(app: web.Application) -> None:
    await app[RESPONSES].end()
    if (table := app[CONTEXT].keys.table) is not None:
        await table.end()
    if (shared := app[CONTEXT].limits.shared) is not None:
        await shared.end()
    app[CONTEXT].large_bodies.shutdown(wait=False, cancel_futures=True)


async def _expect(request: web.Request) -> None:
    """Ask for the body of a client that waits to be asked. What else it expects is ignored, as
    RFC 9110 section 10.1.1 allows; aiohttp would cut the connection without an answer."""
    asks = request.headers.get(hdrs.EXPECT, "").lower() == "100-continue"
    if asks and request.version == HttpVersion11:
        await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        request.writer.output_size = 0


def make_app(
    config: ServerConfig,
    gateway: Gateway,
    registry: Registry,
    dialects: Sequence[Dialect] = BUILT_IN,
    *,
    stall_s: float = STALL_S,
) -> web.Application:
    """The application; ``start`` serves it.

    ``stall_s``: a reader of a stream that takes nothing for so many seconds is given up.
    Raises ``ConfigError`` where responses cannot be kept as configured.
    """
    app = web.Application(middlewares=[every_request], client_max_size=config.max_body_bytes)
    app[CONTEXT] = Context(config, gateway, registry, dialects, stall_s)
    app[RESPONSES] = ResponsesState(config)
    served = routes(dialects)
    app[_PATHS] = frozenset(path for _, path, _ in served)
    app[api_page.DESCRIPTION] = api_page.Description(
        dialects, OPEN_ROUTES, with_keys=config.has_keys
    )
    app.on_response_prepare.append(_on_prepare)
    app.on_startup.append(_on_startup)
    app.on_cleanup.append(_on_cleanup)
    for method, path, handler in served:
        if method == "GET":
            app.router.add_get(path, handler, expect_handler=_expect)
        else:
            app.router.add_route(method, path, handler, expect_handler=_expect)
    return app


async def start(
    app: web.Application,
    sock: socket.socket,
    limits: ConnectionLimits | None = None,
    certificates: Certificates | None = None,
) -> Runner:
    """Serve on a bound socket, with certificates over TLS. Call ``cleanup`` of the result to stop.

    The socket may be shared with other processes; ``cleanup`` closes only this one's handle.
    """
    registry = app[CONTEXT].registry

    def error_response(request: web.BaseRequest | None, error: ApiError) -> web.Response:
        response = _error_response(error)
        request_id = access.request_id(request)
        _stamp(response, request_id)
        registry.inc("http_requests_total", "other", str(error.status))
        log_request(request_id, "other", error.status, error.code or error.kind)
        return response

    runner = Runner(
        app,
        error_response,
        limits or ConnectionLimits(),
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
        root_path=app[CONTEXT].config.root_path,
        certificates=certificates,
    )
    await runner.setup()
    await runner.listen(sock, backlog=BACKLOG)
    return runner
