"""A span that is over, as it was recorded, and the two forms in which a collector gets it.

Imported only while spans are recorded: it needs OpenTelemetry's SDK.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

Value = str | int | float | bool | Sequence[str]
Attributes = Mapping[str, Value]
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_SCOPE = InstrumentationScope("penstock")
_ROOT_FLAGS = int(otlp.SPAN_FLAGS_CONTEXT_HAS_IS_REMOTE_MASK)
_CHILD_FLAGS = _ROOT_FLAGS | int(otlp.SPAN_FLAGS_CONTEXT_IS_REMOTE_MASK)


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

    def write(self, span: otlp.Span, new_id: int, facts: Attributes, since_1970: int) -> None:
        """Fill an empty message of OTLP.

        ``new_id``: of its span, unless it has one; ``facts``: its attributes; ``since_1970``:
        nanoseconds from 1970 to zero of the monotonic clock.
        """
        parent = self.traceparent
        span.trace_id = bytes.fromhex(parent[3:35])
        span.span_id = (self.own_id or new_id).to_bytes(8, "big")
        span.name = self._name
        span.kind = otlp.Span.SPAN_KIND_SERVER if self.own_id else otlp.Span.SPAN_KIND_INTERNAL
        if is_root(parent):
            span.flags = _ROOT_FLAGS
        else:
            span.parent_span_id, span.flags = bytes.fromhex(parent[36:52]), _CHILD_FLAGS
        began = span.start_time_unix_nano = since_1970 + int(self.began * 1e9)
        span.end_time_unix_nano = max(began, since_1970 + int(self.ended * 1e9))
        if self.event is not None:
            event = span.events.add()
            event.name = self.event[0]
            event.time_unix_nano = since_1970 + int(self.event[1] * 1e9)
        if self.error:
            span.status.code, span.status.message = otlp.Status.STATUS_CODE_ERROR, self.error
        if isinstance(facts, BoundedAttributes):
            span.dropped_attributes_count = facts.dropped
        add = span.attributes.add
        for name, value in facts.items():
            attribute = add()
            attribute.key = name
            _write(attribute.value, value)

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


def _write(place: AnyValue, value: Value) -> None:
    if isinstance(value, bool):
        place.bool_value = value
    elif isinstance(value, int):
        place.int_value = value
    elif isinstance(value, str):
        place.string_value = value
    elif isinstance(value, float):
        place.double_value = value
    else:
        for one in value:
            place.array_value.values.add().string_value = one


def is_root(traceparent: str) -> bool:
    """Whether it names a trace and no span in it."""
    return traceparent[36:52] == "0000000000000000"


def context_of(traceparent: str) -> SpanContext:
    """What a ``traceparent`` says, as the SDK has it."""
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(trace_id, span_id, True, TraceFlags(int(traceparent[53:55], 16)))
