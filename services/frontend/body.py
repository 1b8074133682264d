"""Bodies: read within limits, then decoded from JSON without harm."""

from __future__ import annotations

import asyncio
import codecs
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import cache
from typing import Any, TypeVar

import msgspec
from aiohttp import StreamReader, hdrs, web

from penstock.protocol.declared import Declared
from penstock.protocol.shown_values import show
from penstock.protocol.validation import InvalidValue, read
from penstock.services.frontend.errors import ApiError, bad_request, from_invalid, retry_after

Body = TypeVar("Body", bound=Declared)
SLICE_BYTES = 64 * 1024
"""Bytes of a body that are read without a pause, which takes some tenths of a millisecond."""
Pause = Callable[[], None]
"""Called between two slices: in a thread it lets others run."""
MAX_VALUES = 2**19
"""Values in one body, at most, not counting long arrays of token ids in ``prompt``."""
MAX_DEPTH = 64
MAX_CONTAINERS = 100_000
"""Objects and arrays in one body."""
READ_TIMEOUT_S = 30.0

_OPEN = ord("[")
_TO_SQUARE = bytes.maketrans(b"{}", b"[]")
_NOT_STRUCTURE = bytes(set(range(256)) - set(b'[]{}",'))


def check_is_json(request: web.Request) -> None:
    """Raise ``ApiError`` 415 unless the request says that its body, if it has one, is JSON.

    A browser lets every page send text, forms and bodies of no type to any server without asking
    it first (https://fetch.spec.whatwg.org/#cors-safelisted-request-header), but not JSON.
    """
    if not request.body_exists:  # SDKs send no type then
        return
    given = request.headers.get(hdrs.CONTENT_TYPE)
    kind = request.content_type
    if given is not None and (kind == "application/json" or kind.endswith("+json")):
        return
    if given is None:
        said = "this request has no Content-Type"
    elif kind == "application/x-www-form-urlencoded":
        said = f"this request has {show(given)}, which `curl -d` sends where no header is given"
    else:
        said = f"this request has {show(given)}"
    raise ApiError(
        415,
        "The body must be JSON and say so: send the header `Content-Type: application/json`; "
        f"{said}",
        code="unsupported_media_type",
    )


def too_large(limit: int) -> ApiError:
    return ApiError(
        413,
        f"The request body is larger than {limit} bytes; --max-body-bytes sets the limit",
        code="request_too_large",
    )


class BodyBudget:
    """The memory that all bodies may take together, in bytes."""

    def __init__(self, limit: int) -> None:
        self.used = 0
        self.limit = limit

    def take(self, size: int) -> None:
        """Raises ``ApiError`` 503 where there is no room."""
        if self.used + size > self.limit:
            raise ApiError(
                503,
                f"Request bodies of more than {self.limit} bytes are being read; try again",
                kind="overloaded_error",
                headers=retry_after(1.0),
            )
        self.used += size


@asynccontextmanager
async def body_of(request: web.Request, limit: int, budget: BodyBudget) -> AsyncIterator[bytes]:
    """The whole body, held against ``budget`` for the time of the block.

    Raises ``ApiError``: 413 (without reading where its length says so), 408, 400, 503.
    """
    length = request.content_length
    if length is not None and length > limit:
        raise too_large(limit)
    data = bytearray()
    try:
        await _read(request.content, data, limit, budget)
        yield bytes(data)
    finally:
        budget.used -= len(data)


async def _read(content: StreamReader, data: bytearray, limit: int, budget: BodyBudget) -> None:
    """Append to ``data`` all that comes."""
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            while piece := await content.readany():
                if len(data) + len(piece) > limit:
                    raise too_large(limit)
                budget.take(len(piece))
                data += piece
    except TimeoutError:
        raise ApiError(
            408, f"The request body did not arrive within {READ_TIMEOUT_S:.0f} s"
        ) from None
    except web.RequestPayloadError:
        raise bad_request(
            "The request body does not fit its length, Transfer-Encoding or Content-Encoding"
        ) from None


def no_pause() -> None:
    """For small bodies."""


def _slices(body: bytes) -> Iterator[bytes]:
    """The body in parts, none of which ends within an escape."""
    begin = 0
    while begin < len(body):
        part = body[begin : begin + SLICE_BYTES]
        begin += len(part)
        if begin < len(body) and (len(part) - len(part.rstrip(b"\\"))) % 2:
            part, begin = part[:-1], begin - 1
        yield part


def check_depth(body: bytes, pause: Pause = no_pause) -> None:
    """Raise ``ApiError`` for nesting, or numbers of values, that a decoder should not see. Linear,
    mostly in C.

    Needs no valid JSON: on other input it may count wrongly, and the decoder then refuses it.
    """
    counts_values = len(body) > 2 * MAX_VALUES
    if not counts_values and body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    depth = containers = values = 0
    within_string = 0
    for part in _slices(body):
        pause()
        # Escapes first, so that every quote left opens or closes a string. A run of backslashes
        # begins with an escape, so pairs go from the left.
        bare = part.replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = bare.translate(_TO_SQUARE, _NOT_STRUCTURE).split(b'"')
        structure = b"".join(pieces[within_string::2])
        within_string = (within_string + len(pieces) - 1) % 2
        values += structure.count(b",")
        if values > MAX_VALUES:
            raise bad_request(
                f"The request body holds more than {MAX_VALUES} values beside its token ids"
            )
        for byte in structure.translate(None, b","):
            if byte == _OPEN:
                depth += 1
                containers += 1
                if depth > MAX_DEPTH:
                    raise bad_request(f"The request body is nested deeper than {MAX_DEPTH} levels")
            else:
                depth -= 1
                if depth < 0:
                    return  # not JSON from here on; the decoder gets no further either
        if containers > MAX_CONTAINERS:
            raise bad_request(
                f"The request body holds more than {MAX_CONTAINERS} arrays and objects"
            )


def _not_json(body: bytes, error: Exception) -> str:
    """Why the decoder has failed, in words that tell a client what to send."""
    if not body:
        return "The request body is empty; a JSON object is needed"
    if body.startswith(codecs.BOM_UTF8):
        return "The request body begins with a byte order mark; send UTF-8 without one"
    if body.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return "The request body is UTF-16; send UTF-8"
    return f"The request body is not valid JSON: {str(error)[:200]}"


def decode_object(body: bytes, pause: Pause = no_pause) -> dict[str, Any]:
    """Decode a JSON object and leave out its null fields. Raises ``ApiError`` 400."""
    check_depth(body, pause)
    try:
        decoded = msgspec.json.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError) as error:
        raise bad_request(_not_json(body, error)) from None
    if not isinstance(decoded, dict):
        raise bad_request(f"The request body must be a JSON object, got {show(decoded)}")
    return {key: value for key, value in decoded.items() if value is not None}


def decode_body(body: bytes, declared: type[Body], pause: Pause = no_pause) -> Body:
    """Decode a JSON object as it is declared. Raises ``ApiError`` 400.

    What is right goes through msgspec alone; anything else is read piece by piece.
    """
    check_depth(body, pause)
    try:
        decoded: Body = _decoder(declared).decode(body)
        return decoded
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        pass
    try:
        found: Body = read(decode_object(body, pause), declared)
    except InvalidValue as invalid:
        raise from_invalid(invalid) from None
    return found


@cache
def _decoder(declared: type[Body]) -> msgspec.json.Decoder[Body]:
    return msgspec.json.Decoder(declared)
