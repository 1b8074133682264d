"""The parts of OTLP's messages that spans need, as bytes of protobuf.

The encoding is that of https://protobuf.dev/programming-guides/encoding/, the numbers of fields
are those of ``opentelemetry/proto/trace/v1/trace.proto`` and ``common/v1/common.proto``. Most
attributes and names come again with every request, so what they are as bytes is kept.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping

Scalar = str | int | float | bool
_KEPT_LENGTH = 128
"""Longer texts may be a client's, and are not kept, so that what is kept stays small."""
_MOST_KEPT = 8192
_OF_ONE_SPAN = frozenset({"penstock.request_id"})
"""Attributes whose values do not come again."""


def _varint(value: int) -> bytes:
    parts = bytearray()
    while value >= 0x80:
        parts.append(value & 0x7F | 0x80)
        value >>= 7
    parts.append(value)
    return bytes(parts)


_SHORT = [_varint(value) for value in range(1024)]


def varint(value: int) -> bytes:
    """``value``: from 0 to 2**64 - 1."""
    return _SHORT[value] if value < 1024 else _varint(value)


def delimited(tag: bytes, content: bytes) -> bytes:
    """A field of a string, of bytes or of a message. ``tag``: its number times 8, and 2."""
    size = len(content)
    return tag + (_SHORT[size] if size < 1024 else _varint(size)) + content


def any_value(value: Scalar | tuple[str, ...]) -> bytes:
    """An ``AnyValue``. Raises ``OverflowError`` for an integer of more than 64 bits."""
    if isinstance(value, bool):
        return b"\x10\x01" if value else b"\x10\x00"
    if isinstance(value, int):
        return b"\x18" + varint(int.from_bytes(value.to_bytes(8, "big", signed=True), "big"))
    if isinstance(value, str):
        return delimited(b"\x0a", value.encode())
    if isinstance(value, float):
        return struct.pack("<Bd", 0x21, value)
    return delimited(b"\x2a", b"".join([delimited(b"\x0a", any_value(one)) for one in value]))


def attribute(key: str, value: Scalar | tuple[str, ...]) -> bytes:
    """A ``Span.attributes`` with its tag."""
    pair = delimited(b"\x0a", key.encode()) + delimited(b"\x12", any_value(value))
    return delimited(b"\x4a", pair)


class _Kept(dict[tuple[str, object], bytes]):
    """Attributes as bytes, each made when it is first asked for. What comes but once is not kept.

    The values of a key are of one type, as OpenTelemetry wants it: 1 and 1.0 are the same here.
    """

    def __missing__(self, item: tuple[str, object]) -> bytes:
        key, value = item
        made = attribute(key, value)  # type: ignore[arg-type]
        if key in _OF_ONE_SPAN or (isinstance(value, str) and len(value) > _KEPT_LENGTH):
            return made
        if len(self) >= _MOST_KEPT:
            self.clear()
        self[item] = made
        return made


_kept = _Kept()


def name_and_kind(name: str, kind: int) -> bytes:
    """``Span.name`` and ``Span.kind`` with their tags."""
    return delimited(b"\x2a", name.encode()) + b"\x30" + varint(kind)


def attributes(facts: Mapping[str, object]) -> bytes:
    """All attributes of a span. A sequence of strings may be of any kind; a tuple takes least."""
    try:
        return b"".join(map(_kept.__getitem__, facts.items()))
    except TypeError:  # a list has no hash
        known: list[tuple[str, object]] = [
            (key, value if isinstance(value, (str, int, float)) else tuple(value))  # type: ignore[arg-type]
            for key, value in facts.items()
        ]
        return b"".join(map(_kept.__getitem__, known))
