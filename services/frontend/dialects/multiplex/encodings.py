"""Frames as JSON texts and as msgpack, and bodies of either as the JSON that dialects read."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import closest
from penstock.services.frontend.bodies.multiplex import MAX_ID_LENGTH, ErrorFrame
from penstock.services.frontend.bodies.responses import ErrorInfo
from penstock.services.frontend.errors import ApiError, bad_request
from penstock.services.frontend.websockets.messages import (
    Message,
    binary_message,
    text_message,
)

MAX_PACKED_BYTES = 1024 * 1024
"""Of a frame in msgpack: a byte of it may become an object of Python's, before anything can be
counted."""
MEMBERS = ("id", "type", "body")
_PLAIN = frozenset({str, int, bool, type(None)})
_UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError)

Members = dict[str, msgspec.Raw]
"""The members of a frame by their names, as they were written."""


class Encoding(NamedTuple):
    """A way to write frames."""

    name: str
    encode: Callable[[Any], bytes]
    decode: Callable[[msgspec.Raw], Any]
    members: Callable[[bytes], Members]
    message: Message
    closing: bytes
    """What follows the last member of an object."""

    def frame(self, frame: msgspec.Struct) -> bytes:
        """A frame as a whole message."""
        return self.message(self.encode(frame))

    def opening(self, frame: msgspec.Struct) -> bytes:
        """A frame whose last member is an empty text, up to that text."""
        return self.encode(frame)[: -len(self.encode("") + self.closing)]

    def error(self, error: ApiError, name: str | None) -> bytes:
        """name: of the request that it ends."""
        info = ErrorInfo(message=error.message, type=error.kind, param=error.param, code=error.code)
        wait = error.headers.get("Retry-After")
        return self.frame(
            ErrorFrame(
                id=name,
                status=error.status,
                error=info,
                retry_after_s=UNSET if wait is None else int(wait),
            )
        )


JSON = Encoding(
    "JSON",
    msgspec.json.encode,
    msgspec.json.decode,
    msgspec.json.Decoder(Members).decode,
    text_message,
    b"}",
)
MSGPACK = Encoding(
    "msgpack",
    msgspec.msgpack.encode,
    msgspec.msgpack.decode,
    msgspec.msgpack.Decoder(Members).decode,
    binary_message,
    b"",
)


def members_of(raw: bytes, encoding: Encoding) -> Members:
    """The members of a client's frame. Raises ``ApiError``: 413, 400."""
    if encoding is MSGPACK and len(raw) > MAX_PACKED_BYTES:
        raise ApiError(
            413,
            f"The frame has {len(raw)} bytes of msgpack; at most {MAX_PACKED_BYTES} are allowed, "
            "send JSON instead, which may have more (--max-body-bytes)",
            code="request_too_large",
        )
    try:
        found = encoding.members(raw)
    except _UNREADABLE as error:
        raise bad_request(
            f"The frame is no object in {encoding.name}: {str(error)[:200]}", code="malformed_frame"
        ) from None
    for name in found:
        if name not in MEMBERS:
            meant = closest(name, MEMBERS)
            hint = f"; did you mean {meant}?" if meant else ""
            raise bad_request(
                f"The frame has an unknown member {show(name)}; id, type and body are "
                f"allowed{hint}",
                param=name[:MAX_ID_LENGTH],
            )
    return found


def id_of(members: Members, encoding: Encoding) -> str:
    """Raises ``ApiError`` 400."""
    found = _member(members, "id", encoding)
    if not isinstance(found, str) or not 1 <= len(found) <= MAX_ID_LENGTH:
        raise _wrong_member("id", found, f"a string of 1 to {MAX_ID_LENGTH} characters is allowed")
    return found


def type_of(members: Members, encoding: Encoding) -> Any:
    """Any value. Raises ``ApiError`` 400 where there is none."""
    return _member(members, "type", encoding)


def wrong_type(given: Any) -> ApiError:
    return _wrong_member("type", given, "'chat', 'completion' or 'cancel' is allowed")


def _wrong_member(name: str, value: Any, allowed: str) -> ApiError:
    return bad_request(f"{name} is {show(value)}; {allowed}", param=name)


def _member(members: Members, name: str, encoding: Encoding) -> Any:
    if name not in members:
        raise bad_request(f"{name} is missing in the frame", param=name)
    try:
        return encoding.decode(members[name])
    except _UNREADABLE as error:
        raise bad_request(f"{name} cannot be read: {str(error)[:200]}", param=name) from None


def json_body(body: msgspec.Raw, encoding: Encoding) -> bytes:
    """The body of a frame as JSON. Raises ``ApiError`` 400 for what JSON does not know."""
    if encoding is JSON:
        return bytes(body)
    try:
        value = encoding.decode(body)
    except _UNREADABLE as error:
        raise bad_request(f"body cannot be read: {str(error)[:200]}", param="body") from None
    _check_is_json(value)
    return msgspec.json.encode(value)


def _check_is_json(value: Any) -> None:
    waiting = [value]
    while waiting:
        one = waiting.pop()
        kind = type(one)
        if kind in _PLAIN or (kind is float and math.isfinite(one)):
            continue
        if kind is list:
            waiting += one
        elif kind is dict:
            for key in one:
                if type(key) is not str and type(key) is not int:
                    raise _no_json(f"the key {show(key)}")
            waiting += one.values()
        else:
            raise _no_json(show(one))


def _no_json(what: str) -> ApiError:
    return bad_request(
        f"body holds {what}, for which JSON has no form; objects with strings or whole numbers as "
        "keys, arrays, strings, finite numbers, true, false and nil are allowed",
        param="body",
    )
