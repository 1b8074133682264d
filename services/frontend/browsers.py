"""What web pages may do: a browser calls us for any page that asks it to.

Such a page reaches a server that only this machine can reach, and calls it with the user's rights.
Three things tell it apart from a client that means us: its ``Origin``; ``Sec-Fetch-Site``, which no
page can set (https://www.w3.org/TR/fetch-metadata/); and the name in ``Host``, for a page whose own
name was pointed at our address (DNS rebinding).
"""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from aiohttp import hdrs, web

from penstock.protocol.config.server_fields import ServerConfig
from penstock.protocol.shown_values import show
from penstock.protocol.wire.addresses import is_loopback
from penstock.services.frontend.errors import ApiError

_FOREIGN_SITES = frozenset({"cross-site", "same-site"})
_METHODS = "GET, POST, DELETE"
_HEADERS = (
    "authorization, content-type, x-api-key, x-request-id, anthropic-version, anthropic-beta, "
    "anthropic-dangerous-direct-browser-access"
)
"""Headers of requests that a page may send where it does not say which it wants to send."""
MAX_ASKED = 2048
"""Characters of the names of headers that a page may ask for."""
_NAMES = re.compile(r"[A-Za-z0-9_-]+( *, *[A-Za-z0-9_-]+){0,63}")
_EXPOSED = ", ".join(
    (
        *("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry"),
        *(
            f"x-ratelimit-{what}-{of}"
            for what in ("limit", "remaining", "reset")
            for of in ("requests", "tokens")
        ),
    )
)
"""Headers of answers that a page may read."""
_PREFLIGHT_SECONDS = "600"


class Browsers:
    """Which pages may call: those of our own origin, and those of ``--allowed-origins``."""

    def __init__(self, config: ServerConfig) -> None:
        self._allowed = frozenset(origin.lower() for origin in config.allowed_origins)
        self._hosts = frozenset(_name(urlsplit(one).netloc) for one in self._allowed)
        # With keys a page must know one; on other addresses any name may be ours.
        self._checks_host = is_loopback(config.host) and not config.has_keys

    def check(self, request: web.Request) -> None:
        """Raise ``ApiError`` 403 where the call comes from the page of somebody else."""
        host = request.headers.get(hdrs.HOST, "").lower()
        if self._checks_host and host and not self._is_ours(_name(host)):
            raise _refused(
                f"This server is local and is not called {show(_name(host))}; --allowed-origins "
                "names the web origins of a proxy in front of it",
                "foreign_host",
            )
        origin = request.headers.get(hdrs.ORIGIN)
        if origin is None:
            headers = request.headers
            foreign = headers.get("Sec-Fetch-Site", "") in _FOREIGN_SITES
            if foreign and headers.get("Sec-Fetch-Mode") != "navigate":  # a link may lead here
                raise _foreign_origin()
        elif not self._is_allowed(origin, host):
            raise _foreign_origin()

    def answers_preflight(self, request: web.Request) -> bool:
        """Whether this is a browser's question if a page may call. Checked pages only."""
        return request.method == hdrs.METH_OPTIONS and (
            hdrs.ACCESS_CONTROL_REQUEST_METHOD in request.headers and self._is_named(request)
        )

    def stamp(self, request: web.Request, response: web.StreamResponse) -> None:
        """Let the browser show our answer to a page of ``--allowed-origins``."""
        if not self._allowed:
            return
        headers = response.headers
        headers[hdrs.VARY] = hdrs.ORIGIN
        if not self._is_named(request):
            return
        headers[hdrs.ACCESS_CONTROL_ALLOW_ORIGIN] = request.headers[hdrs.ORIGIN]
        headers[hdrs.ACCESS_CONTROL_EXPOSE_HEADERS] = _EXPOSED
        if request.method == hdrs.METH_OPTIONS:
            headers[hdrs.ACCESS_CONTROL_ALLOW_METHODS] = _METHODS
            # SDKs add headers of their own, which a browser asks for by name.
            asked = request.headers.get(hdrs.ACCESS_CONTROL_REQUEST_HEADERS, "")
            known = len(asked) <= MAX_ASKED and _NAMES.fullmatch(asked)
            headers[hdrs.ACCESS_CONTROL_ALLOW_HEADERS] = asked if known else _HEADERS
            headers[hdrs.ACCESS_CONTROL_MAX_AGE] = _PREFLIGHT_SECONDS

    def _is_named(self, request: web.Request) -> bool:
        return request.headers.get(hdrs.ORIGIN, "").lower() in self._allowed

    def _is_allowed(self, origin: str, host: str) -> bool:
        if origin.lower() in self._allowed:
            return True
        try:
            netloc = urlsplit(origin).netloc.lower()
        except ValueError:
            return False
        return bool(netloc) and netloc == host

    def _is_ours(self, name: str) -> bool:
        return is_loopback(name) or name.endswith(".localhost") or name in self._hosts


def _name(netloc: str) -> str:
    """``HOST`` of ``HOST[:PORT]``; brackets of an IPv6 address stay."""
    if netloc.startswith("["):
        return netloc.partition("]")[0] + "]"
    return netloc.partition(":")[0]


def _refused(message: str, code: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code=code)


def _foreign_origin() -> ApiError:
    return _refused(
        "Calls from web pages of another origin are refused; --allowed-origins lets some through",
        "foreign_origin",
    )
