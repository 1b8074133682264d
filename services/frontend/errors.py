"""Errors in the shape that OpenAI's clients read: ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

import math

from penstock.client.refusals import SHUTTING_DOWN
from penstock.protocol.validation import InvalidValue
from penstock.protocol.wire.messages.requests import Rejected
from penstock.services.frontend.bodies.responses import ErrorBody, ErrorInfo
from penstock.services.frontend.json_lines import encode

INVALID_REQUEST = "invalid_request_error"

_KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}


class ApiError(Exception):
    """An answer other than success. The message goes to the client as it is."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = headers or {}
        self.request_id = ""
        """The request's, for the APIs whose errors name it."""

    def body(self) -> bytes:
        """The JSON of an error answer, and of an error event in a stream."""
        info = ErrorInfo(message=self.message, type=self.kind, param=self.param, code=self.code)
        return encode(ErrorBody(error=info))


def bad_request(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    return ApiError(400, message, param=param, code=code)


def from_invalid(invalid: InvalidValue) -> ApiError:
    """A 400 for a value that is not what its declaration says."""
    return bad_request(invalid.message, invalid.param, invalid.code)


def status_error(status: int, message: str) -> ApiError:
    """An error for an HTTP status that has no further cause to name."""
    kind = "server_error" if status >= 500 else _KINDS.get(status, INVALID_REQUEST)
    return ApiError(status, message, kind=kind)


def retry_after(seconds: float | None) -> dict[str, str]:
    """The ``Retry-After`` header; it holds whole seconds (RFC 9110, 10.2.3)."""
    if seconds is None:
        return {}
    return {"Retry-After": str(max(1, math.ceil(min(seconds, 86_400.0))))}


def shutting_down() -> ApiError:
    """What a connection hears that asks for something new while its server goes down."""
    return ApiError(
        503,
        "The server is shutting down; connect again",
        kind="overloaded_error",
        code=SHUTTING_DOWN,
        headers=retry_after(1.0),
    )


def from_rejected(rejected: Rejected) -> ApiError:
    """What another process says about a request, as the client's error."""
    status = rejected.status if 400 <= rejected.status < 600 else 500
    return ApiError(
        status,
        rejected.message,
        kind=rejected.kind,
        param=rejected.param,
        code=rejected.code,
        headers=retry_after(rejected.retry_after),
    )
