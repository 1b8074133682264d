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
_TIMES = struct.Struct("<BQBQ").pack
"""Tag and value of a span's begin, and of its end."""
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
        above, own_id = self.traceparent, self.own_id
        began, ended = since_1970 + int(self.began * 1e9), since_1970 + int(self.ended * 1e9)
        rest = self._rest(since_1970, dropped) if self.event or self.error or dropped else b""
        if own_id:
            new_id = own_id.to_bytes(8, "big")
        if above[36:52] == _NO_PARENT:
            ids, flags = _hex(f"0a10{above[3:35]}1208"), _ROOT_FLAGS
        else:
            ids, flags = _hex(f"0a10{above[3:35]}2208{above[36:52]}1208"), _CHILD_FLAGS
        fixed, known = _fixed(self.name, _SERVER if own_id else _INTERNAL, flags), attributes(facts)
        times = _TIMES(0x39, began, 0x41, ended if ended > began else began)
        size = varint(len(ids) + 26 + len(fixed) + len(known) + len(rest))
        return b"".join((b"\x12", size, ids, new_id, times, fixed, known, rest))

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


@lru_cache(maxsize=1024)
def _fixed(name: str, kind: int, flags: int) -> bytes:
    """What is the same in all spans of a name."""
    return name_and_kind(name, kind) + b"\x85\x01" + flags.to_bytes(4, "little")
