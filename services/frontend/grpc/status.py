"""Errors as gRPC has them: a code, a message, and details that clients can read."""

from __future__ import annotations

import grpc
from google.protobuf.any_pb2 import Any as AnyMessage
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2 as details
from google.rpc.status_pb2 import Status

from penstock.services.frontend.errors import ApiError

DOMAIN = "penstock"
DETAILS_KEY = "grpc-status-details-bin"
MAX_MESSAGE_BYTES = 1500
"""Of an error's message. It travels twice among the trailing metadata, of which clients take 8 kB,
and in one of them a byte may become three."""

_CODES = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    415: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    499: grpc.StatusCode.CANCELLED,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}

Metadata = tuple[tuple[str, str | bytes], ...]


def code_of(status: int) -> grpc.StatusCode:
    """The code for a status of HTTP."""
    other = grpc.StatusCode.INTERNAL if status >= 500 else grpc.StatusCode.INVALID_ARGUMENT
    return _CODES.get(status, other)


def message_of(error: ApiError) -> str:
    """What a client is told, as long as it may be."""
    raw = error.message.encode(errors="replace")
    return raw[:MAX_MESSAGE_BYTES].decode(errors="ignore")


def trailing(error: ApiError, request_id: str) -> Metadata:
    """The metadata behind an error: ``google.rpc.Status`` with what is known of it, and the wait as
    HTTP says it."""
    found: list[Message] = [
        details.ErrorInfo(reason=error.code or error.kind, domain=DOMAIN),
        details.RequestInfo(request_id=request_id),
    ]
    metadata: list[tuple[str, str | bytes]] = []
    if error.param is not None:
        violation = details.BadRequest.FieldViolation(field=error.param)
        found.append(details.BadRequest(field_violations=[violation]))
    if (wait := error.headers.get("Retry-After")) is not None:
        delay = Duration()
        delay.FromMilliseconds(int(error.headers.get("retry-after-ms", 1000 * int(wait))))
        found.append(details.RetryInfo(retry_delay=delay))
        metadata.append(("retry-after", wait))
    status = Status(code=code_of(error.status).value[0], message=message_of(error))
    for one in found:
        packed = AnyMessage()
        packed.Pack(one)
        status.details.append(packed)
    return (*metadata, (DETAILS_KEY, status.SerializeToString()))
