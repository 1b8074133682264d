"""Who may call, and under which id a call is known."""

from __future__ import annotations

import hashlib
import hmac
import re
import uuid

from aiohttp import web

from penstock.services.frontend.errors import ApiError

_REQUEST_ID = re.compile(r"[A-Za-z0-9_-]{1,128}")
_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-[!-~]{0,100})?",
    re.IGNORECASE,
)
"""A ``traceparent`` of any version: what a later one adds stands behind a further dash."""


def request_id(request: web.BaseRequest | None) -> str:
    """The client's ``x-request-id`` where it is harmless, else one of our own.

    It is only ever echoed: no process keys anything by it.
    """
    given = "" if request is None else request.headers.get("x-request-id", "")
    return given if _REQUEST_ID.fullmatch(given) else f"req-{uuid.uuid4().hex}"


def traceparent(request: web.BaseRequest) -> str:
    """The client's ``traceparent`` (W3C Trace Context), empty where it has none that can be read.

    It is the caller's business: one that is malformed is no reason to refuse a request.
    """
    given = request.headers.get("traceparent", "").strip()
    return given if _TRACEPARENT.fullmatch(given) else ""


def trace_id(traceparent: str) -> str:
    """The trace that a request is part of; empty where it is part of none."""
    return traceparent[3:35].lower()


class ApiKeys:
    """The keys that clients may use. Only their hashes are kept."""

    def __init__(self, keys: list[str]) -> None:
        self._hashes = [hashlib.sha256(key.encode()).digest() for key in keys]

    def tenant(self, request: web.Request) -> str:
        """A short name for the caller's key; empty where no keys are configured.

        Raises ``ApiError`` 401. All keys are compared, each in constant time over hashes, so the
        time says nothing about any of them.
        """
        if not self._hashes:
            return ""
        given = _given_key(request)
        digest = hashlib.sha256(given.encode(errors="surrogateescape")).digest()
        known = False
        for key in self._hashes:
            known |= hmac.compare_digest(key, digest)
        if not known:
            message = "The API key is not valid" if given else "An API key is required"
            raise ApiError(
                401,
                f"{message}: send it as `Authorization: Bearer KEY` or `x-api-key: KEY`",
                kind="authentication_error",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )
        return f"key-{digest.hex()[:16]}"


def _given_key(request: web.Request) -> str:
    scheme, _, key = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() == "bearer" and key.strip():
        return key.strip()
    return request.headers.get("x-api-key", "").strip()
