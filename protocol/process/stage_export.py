"""Spans on their way to a collector, made by the thread that exports.

A span is over when it is recorded, so the thread that works on requests only puts what it knows of
it (``Stage``) into a queue (``stage_queue.py``). All else (ids, limits, protobuf) is left to the
queue's thread, in ``StageExporter``, which writes OTLP's bytes itself (``otlp_bytes.py``): that
takes a fraction of what the SDK takes to make spans and to encode them.
Imported only while spans are recorded: it needs the SDK.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan, SpanLimits, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter
from opentelemetry.sdk.trace.sampling import (
    ALWAYS_OFF,
    ALWAYS_ON,
    Decision,
    ParentBased,
    ParentBasedTraceIdRatio,
    Sampler,
    SamplingResult,
    StaticSampler,
    TraceIdRatioBased,
)
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    Status,
    StatusCode,
    TraceFlags,
    set_span_in_context,
)

from penstock.protocol.process.otlp_bytes import delimited
from penstock.protocol.process.span_post import post_for_less
from penstock.protocol.process.stage import Attributes, Stage, is_root

_MOST_ATTRIBUTES = 24
"""No span has more, so a higher limit need not be looked at for each."""
_SAMPLED = TraceFlags(TraceFlags.SAMPLED)
_LOW_BITS = (1 << 64) - 1
"""Of a trace id, that ``TraceIdRatioBased`` compares with its bound."""
_SCOPE = InstrumentationScope("penstock")


class Begun(msgspec.Struct, gc=False):
    """A request's span, whose end is not known yet."""

    parent: str
    """``traceparent`` that it is below; without a parent the span id in it is zero."""
    own_id: int
    traceparent: str
    """Its own, for what is done below it."""
    facts: Callable[[], Attributes]
    """To be asked where it is sampled."""
    is_sampled: bool


class RequestSampler:
    """Begins the spans of requests; the provider's sampler says which are sampled."""

    def __init__(self, provider: TracerProvider) -> None:
        self._sampler, self._ids = provider.sampler, provider.id_generator
        self._new_bound = _new_bound(provider.sampler)

    def begin(self, name: str, traceparent: str, facts: Callable[[], Attributes]) -> Begun | None:
        """``traceparent``: the client's, or empty. Its flags but the first go on with it. ``None``:
        neither the client nor the sampler samples it, so nobody needs its ids.

        The samplers that ``OTEL_TRACES_SAMPLER`` names are not asked: what they say depends on the
        ids alone.
        """
        bound = self._new_bound
        if traceparent:
            trace, flags = f"00-{traceparent[3:36]}", int(traceparent[53:55], 16)
            is_sampled = was_sampled = bool(flags & TraceFlags.SAMPLED)
        else:
            trace_id = self._ids.generate_trace_id()
            trace, flags, was_sampled = f"00-{trace_id:032x}-", 0, False
            traceparent = trace + "0000000000000000-01"
            is_sampled = bound is not None and trace_id & _LOW_BITS < bound
        if bound is None:
            asked = self._asked(name, traceparent, facts())
            is_sampled = asked.decision is Decision.RECORD_AND_SAMPLE
            known: Attributes = asked.attributes or {}
            facts = lambda: known  # noqa: E731
        if not is_sampled and not was_sampled:
            return None
        own_id = self._ids.generate_span_id()
        own = f"{trace}{own_id:016x}-{flags & ~TraceFlags.SAMPLED | is_sampled:02x}"
        return Begun(traceparent, own_id, own, facts, is_sampled)

    def _asked(self, name: str, traceparent: str, facts: Attributes) -> SamplingResult:
        context = Context()  # never below what some library holds current
        parent = context_of(traceparent)
        if not is_root(traceparent):
            context = set_span_in_context(NonRecordingSpan(parent), context)
        return self._sampler.should_sample(context, parent.trace_id, name, SpanKind.SERVER, facts)


def _new_bound(sampler: Sampler) -> int | None:
    """Of the traces that no client has begun those are sampled whose lower 64 bits are below this,
    and of the others those that the client samples. ``None``: the sampler has to be asked."""
    if type(sampler) not in (ParentBased, ParentBasedTraceIdRatio):
        return None
    parts = vars(sampler)
    followed = parts.get("_remote_parent_sampled"), parts.get("_remote_parent_not_sampled")
    if followed != (ALWAYS_ON, ALWAYS_OFF):
        return None
    root = parts.get("_root")
    if isinstance(root, StaticSampler):
        return {ALWAYS_ON: _LOW_BITS + 1, ALWAYS_OFF: 0}.get(root)
    return root.bound if type(root) is TraceIdRatioBased else None


class StageExporter:
    """Has ``exporter`` send stages: as bytes where it is known how it sends them, else as spans of
    the SDK.

    ``limits``: those of the provider, for attributes.
    """

    def __init__(
        self, exporter: OTLPSpanExporter, provider: TracerProvider, limits: SpanLimits
    ) -> None:
        self._exporter: SpanExporter = exporter
        client = getattr(exporter, "_client", None)
        # It has no public method for bytes, and this one may be missing in other versions.
        self._send = getattr(client, "export", None)
        post_for_less(client)
        self._resource = provider.resource
        self._count_limit = limits.max_span_attributes
        self._length_limit = limits.max_span_attribute_length
        few = self._count_limit is not None and self._count_limit < _MOST_ATTRIBUTES
        self._is_limited = few or self._length_limit is not None
        # Of a parent that is sampled all samplers of this kind sample its children.
        followed = isinstance(provider.sampler, ParentBased)
        self._sampler: Sampler | None = None if followed else provider.sampler
        any_stage = Stage("", f"00-{1:032x}-{1:016x}-01", 0.0, 0.0, {}, "")
        (sent,) = encode_spans([sdk_span(any_stage, b"", {}, 0, self._resource)]).resource_spans
        sent.scope_spans[0].ClearField("spans")
        self._scope = sent.scope_spans[0].SerializeToString()
        sent.ClearField("scope_spans")
        self._resource_bytes = sent.SerializeToString()

    def export(self, stages: Sequence[Stage]) -> None:
        """Send them; returns when a collector has them or does not want them."""
        if self._sampler is not None:
            stages = [stage for stage in stages if self._is_sampled(stage, self._sampler)]
            if not stages:
                return
        since_1970, ids = time.time_ns() - time.monotonic_ns(), random.randbytes(8 * len(stages))
        if self._send is None:
            spans = [
                sdk_span(one, ids[at : at + 8], self._facts(one), since_1970, self._resource)
                for at, one in zip(range(0, len(ids), 8), stages, strict=True)
            ]
            self._exporter.export(spans)
            return
        written, at = [self._scope], 0
        for one in stages:
            new_id, facts, dropped = ids[at : at + 8], one.facts, 0
            at += 8
            if self._is_limited or one.error:
                facts = self._facts(one)
                dropped = facts.dropped if isinstance(facts, BoundedAttributes) else 0
            written.append(one.encoded(new_id, facts, since_1970, dropped))
        scope = delimited(b"\x12", b"".join(written))
        self._send(delimited(b"\x0a", self._resource_bytes + scope))

    def shutdown(self) -> None:
        """No more is exported, and what is being sent is not sent again."""
        self._exporter.shutdown()

    def _is_sampled(self, stage: Stage, sampler: Sampler) -> bool:
        """As the configured sampler says of a child of this parent."""
        if stage.own_id:
            return True
        parent = context_of(stage.traceparent)
        context = set_span_in_context(NonRecordingSpan(parent))
        asked = sampler.should_sample(context, parent.trace_id, stage.name)
        return asked.decision is Decision.RECORD_AND_SAMPLE

    def _facts(self, stage: Stage) -> Attributes:
        """The attributes of a stage, within the limits."""
        facts = {**stage.facts, "error.type": stage.error} if stage.error else stage.facts
        if not self._is_limited:
            return facts
        bounded: Any = BoundedAttributes(self._count_limit, facts, max_value_len=self._length_limit)
        return bounded  # type: ignore[no-any-return]


def sdk_span(
    stage: Stage, new_id: bytes, facts: Attributes, since_1970: int, resource: Resource
) -> ReadableSpan:
    """A stage as a span of the SDK. Arguments as those of ``Stage.encoded``."""
    trace_id, began = int(stage.traceparent[3:35], 16), since_1970 + int(stage.began * 1e9)
    own_id = stage.own_id or int.from_bytes(new_id, "big")
    events = [] if stage.event is None else [
        Event(stage.event[0], timestamp=since_1970 + int(stage.event[1] * 1e9))
    ]  # fmt: skip
    return ReadableSpan(
        stage.name,
        SpanContext(trace_id, own_id, False, _SAMPLED),
        None if is_root(stage.traceparent) else context_of(stage.traceparent),
        resource,
        facts,
        events,
        kind=SpanKind.SERVER if stage.own_id else SpanKind.INTERNAL,
        status=Status(StatusCode.ERROR, stage.error) if stage.error else Status(),
        start_time=began,
        end_time=max(began, since_1970 + int(stage.ended * 1e9)),
        instrumentation_scope=_SCOPE,
    )


def context_of(traceparent: str) -> SpanContext:
    """What a ``traceparent`` says, as the SDK has it."""
    trace_id, span_id = int(traceparent[3:35], 16), int(traceparent[36:52], 16)
    return SpanContext(trace_id, span_id, True, TraceFlags(int(traceparent[53:55], 16)))
