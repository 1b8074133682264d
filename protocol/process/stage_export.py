"""Stages of requests on their way to a collector: made into spans by the thread that exports.

A stage is over when it is recorded, so the thread that works on requests only puts it into the
queue of the SDK's batch processor. What a span of the SDK costs beside that (ids, limits, locks)
is paid by the processor's own thread, in ``StageExporter``. Imported only while spans are recorded:
it needs the SDK.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_MOST_ATTRIBUTES = 16
"""No stage has more, so a higher limit need not be looked at for each."""


class OwnResource(Resource):
    """A process's one resource, equal to itself alone: the exporter looks it up for each span, and
    the SDK's would be written as JSON each time."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__


class Stage(ReadableSpan):
    """A stage of a request that is over, as it was recorded. Times in monotonic seconds.

    ``traceparent`` is one that is sampled. Only the exporter below reads it.
    """

    _context = SpanContext(1, 1, False, _SAMPLED)
    """Of no span: all that the batch processor asks of it is whether it is sampled."""

    def __init__(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        attributes: Attributes,
        error: str,
    ) -> None:
        self._name = name
        self.traceparent = traceparent
        self.began = began
        self.ended = ended
        self._attributes = attributes
        self.error = error


class StageExporter(SpanExporter):
    """Makes stages into spans, and gives them to ``exporter`` together with other spans.

    ``limits``: those of the provider, for attributes.
    """

    def __init__(
        self, exporter: SpanExporter, provider: TracerProvider, limits: SpanLimits
    ) -> None:
        self._exporter = exporter
        self._resource = provider.resource
        self._new_id: Callable[[], int] = provider.id_generator.generate_span_id
        self._scope = InstrumentationScope("penstock")
        self._count_limit = limits.max_span_attributes
        self._length_limit = limits.max_span_attribute_length
        few = self._count_limit is not None and self._count_limit < _MOST_ATTRIBUTES
        self._is_limited = few or self._length_limit is not None
        # Of a parent that is sampled all samplers of this kind sample its children.
        followed = isinstance(provider.sampler, ParentBased)
        self._sampler: Sampler | None = None if followed else provider.sampler

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        whole = list(self._whole(spans))
        return self._exporter.export(whole) if whole else SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _whole(self, spans: Iterable[ReadableSpan]) -> Iterable[ReadableSpan]:
        since_1970 = time.time_ns() - time.monotonic_ns()
        for span in spans:
            if not isinstance(span, Stage):
                yield span
            elif self._is_sampled(span):
                yield self._span(span, since_1970)

    def _is_sampled(self, stage: Stage) -> bool:
        """As the configured sampler says of a child of this parent; without one, yes."""
        if self._sampler is None:
            return True
        parent = _parent(stage.traceparent)
        context = set_span_in_context(NonRecordingSpan(parent))
        asked = self._sampler.should_sample(context, parent.trace_id, stage.name)
        return asked.decision is Decision.RECORD_AND_SAMPLE

    def _span(self, stage: Stage, since_1970: int) -> ReadableSpan:
        """``since_1970``: nanoseconds from 1970 to zero of the monotonic clock."""
        parent = _parent(stage.traceparent)
        attributes, status = stage.attributes, Status()
        if stage.error:
            attributes = {**(attributes or {}), "error.type": stage.error}
            status = Status(StatusCode.ERROR, stage.error)
        if self._is_limited:
            attributes = BoundedAttributes(
                self._count_limit, attributes, max_value_len=self._length_limit
            )
        began = since_1970 + int(stage.began * 1e9)
        return ReadableSpan(
            stage.name,
            SpanContext(parent.trace_id, self._new_id(), False, _SAMPLED),
            parent,
            self._resource,
            attributes,
            status=status,
            start_time=began,
            end_time=max(began, since_1970 + int(stage.ended * 1e9)),
            instrumentation_scope=self._scope,
        )


def _parent(traceparent: str) -> SpanContext:
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(trace_id, span_id, True, TraceFlags(int(traceparent[53:55], 16)))
