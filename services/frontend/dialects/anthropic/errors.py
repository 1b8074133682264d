"""Errors in the shape that Anthropic's clients read, with a type for each status."""

from __future__ import annotations

from penstock.services.frontend.bodies.anthropic_answers import MessageError, MessageErrorBody
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
    info = MessageError(type=_TYPES.get(error.status, other), message=error.message)
    return encode(MessageErrorBody(error=info, request_id=error.request_id))
