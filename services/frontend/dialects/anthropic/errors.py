"""Errors in the shape that Anthropic's clients read, with a type for each status."""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from penstock.services.frontend.bodies.anthropic_answers import (
    ErrorDetails,
    MessageError,
    MessageErrorBody,
)
from penstock.services.frontend.errors import ApiError
from penstock.services.frontend.json_lines import encode

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_body(error: ApiError) -> bytes:
    """The JSON of an error answer, and of the event that ends a stream."""
    other = "api_error" if error.status >= 500 else "invalid_request_error"
    kind = _TYPES.get(error.status, other)
    info = MessageError(type=kind, message=error.message, details=_details(error))
    return encode(MessageErrorBody(error=info, request_id=error.request_id))


def _details(error: ApiError) -> ErrorDetails | UnsetType:
    """What makes an SDK's tool runner go on by itself.

    It first asks a server to hold the conversation, and sends all of it once it reads this.
    """
    if error.status != 400 or error.param != "thread":
        return UNSET
    return ErrorDetails(error_code="thread_unsupported_request")
