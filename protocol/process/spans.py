"""Spans of requests for an OpenTelemetry collector. Off until ``begin``, which imports the SDK.

Off, a place that may record costs one check of ``SPANS.on``, and ``traceparent`` travels as the
client sent it. On, the frontend opens a span for each request, whose own ``traceparent`` goes with
the request (``RequestHead.trace``), and every process records its stages when they are over:

    if SPANS.on:
        SPANS.record("encode", head.trace, began, ended, {"penstock.prompt_tokens": 7})

A thread of their own makes them into spans and exports them (``stage_export.py``); what does not
fit into its queue is dropped, so a dead collector costs requests nothing. Where to, which and as
whom the standard variables say (https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/):
``OTEL_EXPORTER_OTLP_ENDPOINT``, ``…_HEADERS``, ``OTEL_SERVICE_NAME``, ``OTEL_TRACES_SAMPLER``,
``OTEL_BSP_…``, ``OTEL_…_LIMIT``; ``OTEL_SDK_DISABLED`` turns all off. Names of attributes are those
of the GenAI conventions (https://opentelemetry.io/docs/specs/semconv/gen-ai/), others begin with
``penstock.``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from penstock.protocol.process.stage import Attributes, Stage

if TYPE_CHECKING:
    from penstock.protocol.process.stage_export import Begun, RequestSampler
    from penstock.protocol.process.stage_queue import StageQueue

MODULES = ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http")
"""What the extra ``otel`` brings."""
LAST_SECONDS = 2.0
"""A process that ends waits so long for its last spans to be exported."""
_ODD = frozenset("13579bdfBDF")


def is_sampled(traceparent: str) -> bool:
    """Whether the spans of this trace are wanted: bit 0 of its flags (W3C Trace Context)."""
    return len(traceparent) >= 55 and traceparent[54] in _ODD


class OpenSpan:
    """A request's own span. ``traceparent`` names it as the parent of what is done for it."""

    __slots__ = ("_began", "_begun", "_event", "_name", "_queue", "traceparent")

    def __init__(
        self, name: str, begun: Begun, began: float, queue: Callable[[Stage], None]
    ) -> None:
        self.traceparent = begun.traceparent
        self._name, self._begun, self._began, self._queue = name, begun, began, queue
        self._event: tuple[str, float] | None = None

    def event(self, name: str, at: float) -> None:
        """Something that happened at ``at``, in monotonic seconds. The last one counts."""
        self._event = name, at

    def end(self, attributes: Attributes, error: str = "") -> None:
        """``error``: what kind of error ended the request; empty: none."""
        begun = self._begun
        if not begun.is_sampled:
            return
        facts, ended = {**begun.facts(), **attributes}, time.monotonic()
        stage = Stage(
            self._name, begun.parent, self._began, ended, facts, error, begun.own_id, self._event
        )
        self._queue(stage)


class Spans:
    """The spans of one process. Any thread may record."""

    def __init__(self) -> None:
        self.on = False
        self._sampler: RequestSampler | None = None
        self._queue: StageQueue | None = None

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

        from penstock.protocol.process.stage_export import RequestSampler, StageExporter
        from penstock.protocol.process.stage_queue import StageQueue

        resource = Resource.create({"penstock.process": service, "process.pid": os.getpid()})
        if str(resource.attributes.get(SERVICE_NAME, "")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: "penstock"}))
        limits = SpanLimits()
        provider = TracerProvider(resource=resource, shutdown_on_exit=False, span_limits=limits)
        if isinstance(provider.get_tracer("penstock"), NoOpTracer):
            return
        settings: Any = BatchSpanProcessor
        most, batch = settings._default_max_queue_size(), settings._default_max_export_batch_size()
        delay_ms = settings._default_schedule_delay_millis()
        settings._validate_arguments(most, delay_ms, batch)
        exporter = StageExporter(OTLPSpanExporter(), provider, limits)
        self._sampler = RequestSampler(provider)
        self._queue = StageQueue(exporter, most, batch, delay_ms / 1e3)
        self.on = True

    def flush(self) -> None:
        """Wait until all that was recorded is exported."""
        if self._queue is not None:
            self._queue.flush()

    def end(self) -> None:
        """Export what there is, for ``LAST_SECONDS`` at most. Nothing is recorded any more."""
        queue, self._queue, self._sampler, self.on = self._queue, None, None, False
        if queue is not None:
            queue.end(LAST_SECONDS)

    def open(
        self, name: str, traceparent: str, began: float, attributes: Callable[[], Attributes]
    ) -> OpenSpan | None:
        """A request's span, that begins at ``began`` (monotonic seconds), below the client's.
        ``attributes``: asked when it ends, and only where it is sampled, or by a sampler that wants
        them. ``None``: nothing is recorded of it, and ``traceparent`` asks for nothing either."""
        sampler, queue = self._sampler, self._queue
        if sampler is None or queue is None:
            return None
        begun = sampler.begin(name, traceparent, attributes)
        return None if begun is None else OpenSpan(name, begun, began, queue.add)

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
        queue = self._queue  # another thread may end it all meanwhile
        if queue is not None and is_sampled(traceparent):
            queue.add(Stage(name, traceparent, began, ended, attributes, error))

    def record_continuation(self, lost: str, traceparent: str, began: float, cause: str) -> None:
        """A request was begun again after the loss of a process of the service ``lost``, and
        another one has it now."""
        if self.on:
            attributes = {"penstock.lost": lost, "penstock.cause": cause}
            self.record("continuation", traceparent, began, time.monotonic(), attributes)


SPANS = Spans()
"""The spans of this process."""
