"""A span that is over, as it was recorded, and its bytes in OTLP."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from functools import lru_cache

import msgspec

from penstock.protocol.process.otlp_bytes import attributes, delimited, name_and_kind, varint

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
_NO_PARENT = "0000000000000000"
_ROOT_FLAGS, _CHILD_FLAGS = 0x100, 0x300
"""``SpanFlags``: whether the parent is of another process is known; and it is."""
_INTERNAL, _SERVER = 1, 2
"""Of ``SpanKind``."""
_STATUS_ERROR = b"\x18\x02"
_TIMES = struct.Struct("<QBQ").pack
"""The value of the field of a span's begin, then tag and value of that of its end."""
_EVENT = struct.Struct("<BQ").pack
_hex = bytes.fromhex


class Stage(msgspec.Struct, gc=False):
    """A span that is over. Times in monotonic seconds.

    ``traceparent`` is that of its parent, and sampled; the span id in it is zero where there is no
    parent. It is made for each span of a request, by who works on requests, so it copies nothing.
    """

    name: str
    traceparent: str
    began: float
    ended: float
    facts: Attributes
    error: str
    own_id: int = 0
    """Of a request's span, which others are below. 0: one whose id nobody needs to know."""
    event: tuple[str, float] | None = None
    """What happened in it, and when."""

    def encoded(self, new_id: bytes, facts: Attributes, since_1970: int, dropped: int = 0) -> bytes:
        """The span as a field ``ScopeSpans.spans``.

        ``new_id``: 8 bytes, its id unless it has one; ``facts``: its attributes, of which
        ``dropped`` are left out; ``since_1970``: nanoseconds from 1970 to zero of the monotonic
        clock.
        """
        parent = self.traceparent
        began, ended = since_1970 + int(self.began * 1e9), since_1970 + int(self.ended * 1e9)
        times = _TIMES(began, 0x41, ended if ended > began else began)
        known, own_id = attributes(facts), self.own_id
        rest = self._rest(since_1970, dropped) if self.event or self.error or dropped else b""
        if own_id:
            new_id = own_id.to_bytes(8, "big")
        trace, above = _hex(parent[3:35]), parent[36:52]
        if above == _NO_PARENT:
            whole, size = _root(self.name, _SERVER if own_id else _INTERNAL)
            size += len(known) + len(rest)
            return whole % (varint(size), trace, new_id, times, known, rest)
        whole, size = _child(self.name, _SERVER if own_id else _INTERNAL)
        size += len(known) + len(rest)
        return whole % (varint(size), trace, new_id, _hex(above), times, known, rest)

    def _rest(self, since_1970: int, dropped: int) -> bytes:
        """What few spans have."""
        rest = b""
        if self.event is not None:
            at = _EVENT(0x09, since_1970 + int(self.event[1] * 1e9))
            rest = delimited(b"\x5a", at + delimited(b"\x12", self.event[0].encode()))
        if self.error:
            message = delimited(b"\x12", self.error.encode())
            rest += delimited(b"\x7a", message + _STATUS_ERROR)
        if dropped:
            rest += b"\x50" + varint(dropped)
        return rest


def is_root(traceparent: str) -> bool:
    """Whether it names a trace and no span in it."""
    return traceparent[36:52] == _NO_PARENT


def _form(name: str, kind: int, parent: bytes, flags: int) -> tuple[bytes, int]:
    """A span but for size, trace, id, ``parent``, times, attributes and the rest, in this order;
    and its size without the last two."""
    fixed = name_and_kind(name, kind) + b"\x85\x01" + flags.to_bytes(4, "little")
    head = b"\x0a\x10%b\x12\x08%b" + parent + b"\x39%b"
    size = len(head) - 2 * head.count(b"%") + 16 + 8 + 17 + (8 if parent else 0) + len(fixed)
    return b"\x12%b" + head + fixed.replace(b"%", b"%%") + b"%b%b", size


@lru_cache(maxsize=1024)
def _root(name: str, kind: int) -> tuple[bytes, int]:
    return _form(name, kind, b"", _ROOT_FLAGS)


@lru_cache(maxsize=1024)
def _child(name: str, kind: int) -> tuple[bytes, int]:
    return _form(name, kind, b"\x22\x08%b", _CHILD_FLAGS)
