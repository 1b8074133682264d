"""Spans of requests for an OpenTelemetry collector. Off until ``begin``, which imports the SDK.

Off, a place that may record costs one check of ``SPANS.on``, and ``traceparent`` travels as the
client sent it. On, the frontend opens a span for each request, whose own ``traceparent`` goes with
the request (``RequestHead.trace``), and every process records its stages when they are over:

    if SPANS.on:
        SPANS.record("encode", head.trace, began, ended, {"penstock.prompt_tokens": 7})

The SDK's batch processor makes the stages into spans (``stage_export.py``) and exports them from a
thread of its own, and drops what does not fit into its queue, so a dead collector costs requests
nothing. Where to, which and as whom the standard
variables say (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/):
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``…_HEADERS``, ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``,
``OTEL_BSP_…``, ``OTEL_…_LIMIT``; ``OTEL_SDK_DISABLED`` turns all off. Names of attributes are those
of the GenAI conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/), others begin with
``penstock.``.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
    from opentelemetry.trace import Span, Tracer

    from penstock.protocol.process.stage_export import Stage

MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What the extra ``otel`` brings."""
LAST_SECONDS = 2.0
"""A process that ends waits so long for its last spans to be exported."""
Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


def _wall_clock(monotonic: float) -> int:
    """Nanoseconds since 1970 of a time of this process's monotonic clock."""
    return time.time_ns() - int((time.monotonic() - monotonic) * 1e9)


def is_sampled(traceparent: str) -> bool:
    """Whether the spans of this trace are wanted: bit 0 of its flags (W3C Trace Context)."""
    return len(traceparent) >= 55 and bool(int(traceparent[53:55], 16) & 1)


class OpenSpan:
    """A request's own span. ``traceparent`` names it as the parent of what is done for it."""

    __slots__ = ("_span", "traceparent")

    def __init__(self, span: Span) -> None:
        self._span = span
        found = span.get_span_context()
        flags = int(found.trace_flags)
        self.traceparent = f"00-{found.trace_id:032x}-{found.span_id:016x}-{flags:02x}"

    def event(self, name: str, at: float) -> None:
        """Something that happened at ``at``, in monotonic seconds."""
        self._span.add_event(name, timestamp=_wall_clock(at))

    def end(self, attributes: Attributes, error: str = "") -> None:
        """``error``: what kind of error ended the request; empty: none."""
        if self._span.is_recording():
            self._span.set_attributes(dict(attributes))
            if error:
                _fail(self._span, error)
        self._span.end()


def _fail(span: Span, error: str) -> None:
    from opentelemetry.trace import Status, StatusCode

    span.set_attribute("error.type", error)
    span.set_status(Status(StatusCode.ERROR, error))


class Spans:
    """The spans of one process. Any thread may record."""

    def __init__(self) -> None:
        self.on = False
        self._provider: TracerProvider | None = None
        self._tracer: Tracer | None = None
        self._made: type[Stage] | None = None
        self._queue: Callable[[ReadableSpan], None] | None = None

    def wanted(self, traceparent: str) -> str:
        """The first 55 characters of a sampled ``traceparent``; empty for others, and while off."""
        return traceparent[:55] if self.on and is_sampled(traceparent) else ""

    def begin(self, service: str) -> None:
        """Record from now on, as a process of this service, unless ``OTEL_SDK_DISABLED`` says
        otherwise. Raises ``ImportError`` where the extra ``otel`` is not installed, and
        ``ValueError`` for variables that the SDK refuses."""
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import SpanLimits, TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace import NoOpTracer

        from penstock.protocol.process.stage_export import OwnResource, Stage, StageExporter

        resource = Resource.create({"penstock.process": service, "process.pid": os.getpid()})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        limits = SpanLimits()
        provider = TracerProvider(
            resource=OwnResource(resource.attributes, resource.schema_url),
            shutdown_on_exit=False,
            span_limits=limits,
        )
        tracer = provider.get_tracer("penstock")
        if isinstance(tracer, NoOpTracer):
            return
        processor = BatchSpanProcessor(StageExporter(OTLPSpanExporter(), provider, limits))
        provider.add_span_processor(processor)
        self._provider, self._tracer = provider, tracer
        self._made, self._queue = Stage, processor.on_end
        self.on = True

    def end(self) -> None:
        """Export what there is, for ``LAST_SECONDS`` at most. Nothing is recorded any more."""
        provider, self._provider, self._tracer, self.on = self._provider, None, None, False
        self._made = self._queue = None
        if provider is not None:
            last = threading.Thread(target=provider.shutdown, name="last spans", daemon=True)
            last.start()
            last.join(LAST_SECONDS)

    def open(
        self, name: str, traceparent: str, began: float, attributes: Attributes
    ) -> OpenSpan | None:
        """A request's span, that begins at ``began`` (monotonic seconds), below the client's.
        ``None`` while off."""
        if self._tracer is None:
            return None
        from opentelemetry.trace import SpanKind

        return OpenSpan(
            self._tracer.start_span(
                name,
                context=_context(traceparent),
                kind=SpanKind.SERVER,
                attributes=dict(attributes),
                start_time=_wall_clock(began),
            )
        )

    def record(
        self,
        name: str,
        traceparent: str,
        began: float,
        ended: float,
        attributes: Attributes,
        error: str = "",
    ) -> None:
        """A stage that is over; times in monotonic seconds. Nothing where its trace is not
        sampled, or there is none. ``attributes`` are read later, in another thread."""
        made, queue = self._made, self._queue  # another thread may end it all meanwhile
        if made is None or queue is None or not is_sampled(traceparent):
            return
        queue(made(name, traceparent, began, ended, attributes, error))

    def record_continuation(self, lost: str, traceparent: str, began: float, cause: str) -> None:
        """A request was begun again after the loss of a process of the service ``lost``, and
        another one has it now."""
        if self.on:
            attributes = {"penstock.lost": lost, "penstock.cause": cause}
            self.record("continuation", traceparent, began, time.monotonic(), attributes)


def _context(traceparent: str) -> Context:
    """Below this parent, or below none; never below what some library holds current."""
    from opentelemetry.context import Context
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    if not traceparent:
        return Context()
    _, trace_id, span_id, flags = traceparent.split("-")[:4]
    parent = SpanContext(int(trace_id, 16), int(span_id, 16), True, TraceFlags(int(flags, 16)))
    return set_span_in_context(NonRecordingSpan(parent), Context())


SPANS = Spans()
"""The spans of this process."""
