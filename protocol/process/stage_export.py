"""Spans on their way to a collector, made by the thread that exports.

A span is over when it is recorded, so the thread that works on requests only puts what it knows of
it (``Stage``) into the queue of the SDK's batch processor. All else (ids, limits, protobuf) is left
to the processor's own thread, in ``StageExporter``, which writes OTLP's bytes itself
(``otlp_bytes.py``): that takes a fraction of what the SDK takes to make spans and to encode them.
Imported only while spans are recorded: it needs the SDK.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.trace import ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.sampling import Decision, ParentBased, Sampler
from opentelemetry.trace import NonRecordingSpan, SpanKind, TraceFlags, set_span_in_context

from penstock.protocol.process.otlp_bytes import delimited
from penstock.protocol.process.stage import Attributes, Stage, context_of

_MOST_ATTRIBUTES = 24
"""No span has more, so a higher limit need not be looked at for each."""


class Begun(NamedTuple):
    """A request's span, whose end is not known yet."""

    parent: str
    """``traceparent`` that it is below; without a parent the span id in it is zero."""
    own_id: int
    traceparent: str
    """Its own, for what is done below it."""
    facts: Attributes
    is_sampled: bool


class RequestSampler:
    """Begins the spans of requests; the provider's sampler says which are sampled."""

    def __init__(self, provider: TracerProvider) -> None:
        self._sampler, self._ids = provider.sampler, provider.id_generator

    def begin(self, name: str, traceparent: str, facts: Attributes) -> Begun:
        """``traceparent``: the client's, or empty. Its flags but the first go on with it."""
        context, other_flags = Context(), 0  # never below what some library holds current
        if traceparent:
            parent = context_of(traceparent)
            context = set_span_in_context(NonRecordingSpan(parent), context)
            trace_id, other_flags = parent.trace_id, parent.trace_flags & ~TraceFlags.SAMPLED
        else:
            trace_id = self._ids.generate_trace_id()
            traceparent = f"00-{trace_id:032x}-{0:016x}-01"
        asked = self._sampler.should_sample(context, trace_id, name, SpanKind.SERVER, facts)
        is_sampled = asked.decision is Decision.RECORD_AND_SAMPLE
        own_id, flags = self._ids.generate_span_id(), other_flags | is_sampled
        own = f"00-{trace_id:032x}-{own_id:016x}-{flags:02x}"
        return Begun(traceparent, own_id, own, asked.attributes or {}, is_sampled)


class StageExporter(SpanExporter):
    """Has ``exporter`` send stages: as bytes where it is known how it sends them, else as spans of
    the SDK.

    ``limits``: those of the provider, for attributes.
    """

    def __init__(
        self, exporter: OTLPSpanExporter, provider: TracerProvider, limits: SpanLimits
    ) -> None:
        self._exporter: SpanExporter = exporter
        # It has no public method for bytes, and this one may be missing in other versions.
        self._send = getattr(getattr(exporter, "_client", None), "export", None)
        self._resource = provider.resource
        self._new_id: Callable[[], int] = provider.id_generator.generate_span_id
        self._count_limit = limits.max_span_attributes
        self._length_limit = limits.max_span_attribute_length
        few = self._count_limit is not None and self._count_limit < _MOST_ATTRIBUTES
        self._is_limited = few or self._length_limit is not None
        # Of a parent that is sampled all samplers of this kind sample its children.
        followed = isinstance(provider.sampler, ParentBased)
        self._sampler: Sampler | None = None if followed else provider.sampler
        any_stage = Stage("", f"00-{1:032x}-{1:016x}-01", 0.0, 0.0, {}, "")
        (sent,) = encode_spans([any_stage.sdk_span(1, {}, 0, self._resource)]).resource_spans
        sent.scope_spans[0].ClearField("spans")
        self._scope = sent.scope_spans[0].SerializeToString()
        sent.ClearField("scope_spans")
        self._resource_bytes = sent.SerializeToString()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        stages = [one for one in spans if isinstance(one, Stage) and self._is_sampled(one)]
        if not stages:
            return SpanExportResult.SUCCESS
        since_1970, new_id, facts = time.time_ns() - time.monotonic_ns(), self._new_id, self._facts
        if self._send is None:
            return self._exporter.export(
                [one.sdk_span(new_id(), facts(one), since_1970, self._resource) for one in stages]
            )
        written = [
            delimited(b"\x12", one.encoded(new_id(), facts(one), since_1970)) for one in stages
        ]
        scope = delimited(b"\x12", b"".join([self._scope, *written]))
        sent = self._send(delimited(b"\x0a", self._resource_bytes + scope))
        return SpanExportResult.SUCCESS if sent.success else SpanExportResult.FAILURE

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)

    def _is_sampled(self, stage: Stage) -> bool:
        """As the configured sampler says of a child of this parent; without one, yes."""
        if self._sampler is None or stage.own_id:
            return True
        parent = context_of(stage.traceparent)
        context = set_span_in_context(NonRecordingSpan(parent))
        asked = self._sampler.should_sample(context, parent.trace_id, stage.name)
        return asked.decision is Decision.RECORD_AND_SAMPLE

    def _facts(self, stage: Stage) -> Attributes:
        """The attributes of a stage, within the limits."""
        facts = {**stage.facts, "error.type": stage.error} if stage.error else stage.facts
        if not self._is_limited:
            return facts
        bounded: Any = BoundedAttributes(self._count_limit, facts, max_value_len=self._length_limit)
        return bounded  # type: ignore[no-any-return]
