"""Who may call, and under which id a call is known."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
import uuid

from aiohttp import hdrs, web

from penstock.protocol.trace_context import traceparent_of
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.keys.key_table import KeyTable, Refused
from penstock.services.frontend.keys.known_key import ANYBODY, KnownKey, key_of_flag

SUBPROTOCOL = "penstock"
"""What is chosen of the subprotocols of a WebSocket."""
KEY_SUBPROTOCOL = "penstock-key."
"""With the key in base64url behind it, a subprotocol that brings the key: pages can send no header
with a WebSocket."""
_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")


def request_id(request: web.BaseRequest | None) -> str:
    """The client's ``x-request-id`` where it is harmless, else one of our own.

    It names the request in logs, in ``/v1/requests/{id}`` and where one is aborted. A client may
    use one twice, so nothing in the pipeline is keyed by it.
    """
    return harmless_id("" if request is None else request.headers.get("x-request-id", ""))


def harmless_id(given: str) -> str:
    """The id of a request that a client gave, if it may be one, else one of our own."""
    return given if is_harmless(given) else f"req-{uuid.uuid4().hex}"


def is_harmless(given: str) -> bool:
    """Whether this may be the id of a request."""
    return _REQUEST_ID.fullmatch(given) is not None


def traceparent(request: web.BaseRequest) -> str:
    """The client's ``traceparent``, empty where it has none that can be read."""
    return traceparent_of(request.headers.get("traceparent", ""))


class ApiKeys:
    """The keys that clients may use: those of ``--api-key`` and those of a file. Only their hashes
    are kept."""

    def __init__(self, keys: list[str], table: KeyTable | None = None) -> None:
        digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._flags = [
            (digest, key_of_flag(digest.hex(), number)) for number, digest in enumerate(digests, 1)
        ]
        self.table = table

    def of_request(self, request: web.Request) -> KnownKey:
        """Who calls. Raises ``ApiError`` 401."""
        return self.of_text(_given_key(request) if self._are_some else "")

    def of_text(self, given: str) -> KnownKey:
        """Whose key it is; ``ANYBODY`` where no keys are configured.

        Raises ``ApiError`` 401. A key of a file is found by its id, and one hash is compared; keys
        of flags are all compared. Each comparison is in constant time over hashes, so the time
        says nothing about any key.
        """
        if not self._are_some:
            return ANYBODY
        found: KnownKey | None = None
        try:
            found = None if self.table is None else self.table.find(given)
        except Refused as refused:
            raise _unauthorized(str(refused)) from None
        if found is None and self._flags:
            digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
            for known, key in self._flags:
                if hmac.compare_digest(known, digest):
                    found = key
        if found is None:
            message = "The API key is not valid" if given else "An API key is required"
            raise _unauthorized(
                f"{message}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`"
            )
        return found

    def current(self, key: KnownKey) -> KnownKey:
        """The same key as it is now: a connection may be older than the last change of the file.
        Raises ``ApiError`` 401."""
        if not key.id or self.table is None:
            return key
        try:
            return self.table.current(key)
        except Refused as refused:
            raise _unauthorized(str(refused)) from None

    def tenant(self, request: web.Request) -> str:
        """A short name for the caller's key; empty where no keys are configured. Raises
        ``ApiError`` 401."""
        return self.of_request(request).tenant

    @property
    def _are_some(self) -> bool:
        return bool(self._flags) or self.table is not None


def _unauthorized(message: str) -> ApiError:
    return ApiError(
        401,
        message,
        kind="authentication_error",
        code="invalid_api_key",
        headers={"WWW-Authenticate": "Bearer"},
    )


def _given_key(request: web.Request) -> str:
    sent = given_key(request.headers.get("Authorization", ""), request.headers.get("x-api-key", ""))
    return sent or _key_of_page(request)


def given_key(authorization: str, x_api_key: str) -> str:
    """The key in the headers of these names."""
    scheme, _, key = authorization.partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return x_api_key.strip()


def _key_of_page(request: web.Request) -> str:
    """The key among the subprotocols that a client offers; empty where there is none."""
    for offered in request.headers.get(hdrs.SEC_WEBSOCKET_PROTOCOL, "").split(","):
        name, _, key = offered.strip().partition(KEY_SUBPROTOCOL)
        if not name and key:
            try:
                return base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode()
            except (binascii.Error, ValueError):
                return ""
    return ""
