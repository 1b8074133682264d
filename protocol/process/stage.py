"""A span that is over, as it was recorded, and the two forms in which a collector gets it.

Imported only while spans are recorded: it needs OpenTelemetry's SDK.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

from penstock.protocol.process.otlp_bytes import attributes, delimited, name_and_kind, varint

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("penstock")
_ROOT_FLAGS = int(otlp.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_CHILD_FLAGS = _ROOT_FLAGS | int(otlp.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)
_SERVER, _INTERNAL = int(otlp.Span.SPAN_KIND_SERVER), int(otlp.Span.SPAN_KIND_INTERNAL)
_STATUS_ERROR = b"\x18\x02"
# Tags (with the length of an id) and values in turn: ids, both times, flags.
_ROOT = struct.Struct("<H16sH8sBQBQHI")
_CHILD = struct.Struct("<H16sH8sH8sBQBQHI")
_EVENT = struct.Struct("<BQ")


class Stage(ReadableSpan):
    """A span that is over. Times in monotonic seconds.

    ``traceparent`` is that of its parent, and sampled; the span id in it is zero where there is no
    parent. It is made for each span of a request, by who works on requests, so it copies nothing.
    """

    _context = SpanContext(1, 1, False, _SAMPLED)
    """Of no span: all that the SDK's batch processor asks of it is whether it is sampled."""
    own_id = 0
    """Of a request's span, which others are below. 0: one whose id nobody needs to know."""
    event: tuple[str, float] | None = None
    """What happened in it, and when."""

    def __init__(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        facts: Attributes,
        error: str,
    ) -> None:
        self._name = name
        self.traceparent = traceparent
        self.began = began
        self.ended = ended
        self.facts = facts
        self.error = error

    def encoded(self, new_id: int, facts: Attributes, since_1970: int) -> bytes:
        """The span as a message of OTLP.

        ``new_id``: of its span, unless it has one; ``facts``: its attributes; ``since_1970``:
        nanoseconds from 1970 to zero of the monotonic clock.
        """
        parent, own_id = self.traceparent, self.own_id
        began = since_1970 + int(self.began * 1e9)
        ended = max(began, since_1970 + int(self.ended * 1e9))
        ids = bytes.fromhex(parent[3:35]), 0x0812, (own_id or new_id).to_bytes(8, "big")
        times = 0x39, began, 0x41, ended, 0x0185
        if is_root(parent):
            head = _ROOT.pack(0x100A, *ids, *times, _ROOT_FLAGS)
        else:
            parent_id = bytes.fromhex(parent[36:52])
            head = _CHILD.pack(0x100A, *ids, 0x0822, parent_id, *times, _CHILD_FLAGS)
        kind = _SERVER if own_id else _INTERNAL
        whole = head + name_and_kind(self._name, kind) + attributes(facts)
        if self.event is not None:
            at = _EVENT.pack(0x09, since_1970 + int(self.event[1] * 1e9))
            whole += delimited(b"\x5a", at + delimited(b"\x12", self.event[0].encode()))
        if self.error:
            message = delimited(b"\x12", self.error.encode())
            whole += delimited(b"\x7a", message + _STATUS_ERROR)
        if isinstance(facts, BoundedAttributes) and facts.dropped:
            whole += b"\x50" + varint(facts.dropped)
        return whole

    def sdk_span(
        self, new_id: int, facts: Attributes, since_1970: int, resource: Resource
    ) -> ReadableSpan:
        """The same as a span of the SDK. Arguments as those of ``write``."""
        trace_id, began = int(self.traceparent[3:35], 16), since_1970 + int(self.began * 1e9)
        events = [] if self.event is None else [
            Event(self.event[0], timestamp=since_1970 + int(self.event[1] * 1e9))
        ]  # fmt: skip
        return ReadableSpan(
            self._name,
            SpanContext(trace_id, self.own_id or new_id, False, _SAMPLED),
            None if is_root(self.traceparent) else context_of(self.traceparent),
            resource,
            facts,
            events,
            kind=SpanKind.SERVER if self.own_id else SpanKind.INTERNAL,
            status=Status(StatusCode.ERROR, self.error) if self.error else Status(),
            start_time=began,
            end_time=max(began, since_1970 + int(self.ended * 1e9)),
            instrumentation_scope=_SCOPE,
        )


def is_root(traceparent: str) -> bool:
    """Whether it names a trace and no span in it."""
    return traceparent[36:52] == "0000000000000000"


def context_of(traceparent: str) -> SpanContext:
    """What a ``traceparent`` says, as the SDK has it."""
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(trace_id, span_id, True, TraceFlags(int(traceparent[53:55], 16)))
