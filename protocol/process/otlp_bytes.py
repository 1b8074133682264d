"""The parts of OTLP's messages that spans need, as bytes of protobuf.

The encoding is that of https://protobuf.dev/programming-guides/encoding/, the numbers of fields
are those of ``opentelemetry/proto/trace/v1/trace.proto`` and ``common/v1/common.proto``. Most
attributes and names come again with every request, so what they are as bytes is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import lru_cache

Scalar = str | int | float | bool


def varint(value: int) -> bytes:
    """``value``: from 0 to 2**64 - 1."""
    if value < 0x80:
        return bytes((value,))
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


def delimited(tag: int, content: bytes) -> bytes:
    """A field of a string, of bytes or of a message. ``tag``: its number times 8, and 2."""
    return varint(tag) + varint(len(content)) + content


def any_value(value: Scalar | tuple[str, ...]) -> bytes:
    """An ``AnyValue``. Raises ``OverflowError`` for an integer of more than 64 bits."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(int.from_bytes(value.to_bytes(8, "big", signed=True), "big"))
    if isinstance(value, str):
        return delimited(0x0A, value.encode())
    if isinstance(value, float):
        return struct.pack("<Bd", 0x21, value)
    return delimited(0x2A, b"".join([delimited(0x0A, any_value(one)) for one in value]))


@lru_cache(maxsize=4096, typed=True)
def attribute(key: str, value: Scalar | tuple[str, ...]) -> bytes:
    """A ``Span.attributes`` with its tag."""
    pair = delimited(0x0A, key.encode()) + delimited(0x12, any_value(value))
    return delimited(0x4A, pair)


@lru_cache(maxsize=1024)
def name_and_kind(name: str, kind: int) -> bytes:
    """``Span.name`` and ``Span.kind`` with their tags."""
    return delimited(0x2A, name.encode()) + b"\x30" + varint(kind)


def attributes(facts: Mapping[str, object]) -> bytes:
    """All attributes of a span. A sequence of strings may be of any kind."""
    return b"".join(
        [
            attribute(key, value if isinstance(value, (str, int, float)) else tuple(value))  # type: ignore[arg-type]
            for key, value in facts.items()
        ]
    )
