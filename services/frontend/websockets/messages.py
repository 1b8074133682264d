"""Bytes as messages of a WebSocket: RFC 6455, section 5.2, whole and not masked."""

from __future__ import annotations

import struct
from collections.abc import Callable

PING = b"\x89\x00"
_TEXT, _BINARY = 0x81, 0x82
_SMALL = 126
"""Bytes from which on a size takes bytes of its own."""
_TEXT_HEADERS = tuple(struct.pack(">BB", _TEXT, size) for size in range(_SMALL))
_BINARY_HEADERS = tuple(struct.pack(">BB", _BINARY, size) for size in range(_SMALL))

Message = Callable[[bytes], bytes]
"""Makes a message of its payload."""


def text_message(payload: bytes) -> bytes:
    """payload: UTF-8."""
    size = len(payload)
    return (_TEXT_HEADERS[size] if size < _SMALL else _long(_TEXT, size)) + payload


def binary_message(payload: bytes) -> bytes:
    size = len(payload)
    return (_BINARY_HEADERS[size] if size < _SMALL else _long(_BINARY, size)) + payload


def text_messages(lines: bytes) -> bytes:
    """A message for each line."""
    return b"".join(map(text_message, lines.splitlines()))


def _long(kind: int, size: int) -> bytes:
    if size < 65_536:
        return struct.pack(">BBH", kind, _SMALL, size)
    return struct.pack(">BBQ", kind, _SMALL + 1, size)
