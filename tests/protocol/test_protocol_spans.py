"""Spans of one process: what they say, when there are none, and that a collector that is away costs
nothing."""

from __future__ import annotations

import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest
from opentelemetry.attributes import BoundedAttributes
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.trace.v1 import trace_pb2 as otlp
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanLimits, TracerProvider
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.trace import NonRecordingSpan, set_span_in_context
from support.counted import calls
from support.otlp_receiver import collecting

from penstock.protocol.process import logs
from penstock.protocol.process.spans import SPANS, Spans, is_sampled
from penstock.protocol.process.stage import Attributes, Stage
from penstock.protocol.process.stage_export import (
    RequestSampler,
    StageExporter,
    context_of,
    sdk_span,
)
from penstock.protocol.process.stage_queue import StageQueue

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SAMPLED = f"00-{TRACE}-00f067aa0ba902b7-01"
UNSAMPLED = f"00-{TRACE}-00f067aa0ba902b7-00"


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "50")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")


def test_off_nothing_is_wanted_and_the_sdk_is_not_imported() -> None:
    assert not SPANS.on
    assert SPANS.wanted(SAMPLED) == ""
    code = (
        "import sys, penstock.services.scheduler.service, penstock.services.router.service, "
        "penstock.services.frontend.service, penstock.services.tokenizer.service; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture(params=["bytes", "spans of the SDK"])
def sent_as(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the exporter is given; spans where a version of it lacks the method for bytes."""
    if request.param == "bytes":
        monkeypatch.setattr(OTLPSpanExporter, "export", None)
        return
    made = StageExporter.__init__

    def without(self: StageExporter, *given: Any) -> None:
        made(self, *given)
        self._send = None

    monkeypatch.setattr(StageExporter, "__init__", without)


@pytest.mark.usefixtures("sent_as")
def test_a_span_is_below_the_clients_and_stages_are_below_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=blue")
        monkeypatch.setenv("OTEL_SERVICE_NAME", "chat-eu")
        spans, now = Spans(), time.monotonic()
        spans.begin("frontend")
        request = spans.open(
            "chat m", SAMPLED, now - 2.0, lambda: {"gen_ai.operation.name": "chat"}
        )
        assert request is not None
        assert spans.wanted(request.traceparent) == request.traceparent
        assert request.traceparent[3:35] == TRACE
        spans.record("encode", request.traceparent, now - 1.5, now - 0.5, {"penstock.n": 3})
        spans.record("route", request.traceparent, now, now - 0.1, {}, "ValueError")
        spans.record_continuation("engine", request.traceparent, now - 0.5, "its engine was lost")
        request.event("first token", now - 0.5)
        request.end({"gen_ai.usage.output_tokens": 7}, "timeout_error")
        found = {s.name: s for s in collector.await_names(TRACE, {"chat m", "continuation"})}
        spans.end()
    own = found["chat m"]
    assert (own.parent, own.process, own.service) == ("00f067aa0ba902b7", "frontend", "chat-eu")
    assert own.attributes["gen_ai.usage.output_tokens"] == 7
    assert own.failed
    assert own.attributes["error.type"] == "timeout_error"
    encode = found["encode"]
    assert encode.parent == own.id == found["continuation"].parent
    assert encode.ended - encode.begun == pytest.approx(1e9, rel=0.01)
    assert (encode.process, encode.service) == ("frontend", "chat-eu")
    assert abs(encode.begun - own.begun - 0.5e9) < 0.2e9
    assert encode.attributes == {"penstock.n": 3}
    assert not encode.failed
    assert len({one.id for one in found.values()}) == 4
    route = found["route"]
    assert route.failed
    assert route.attributes == {"error.type": "ValueError"}
    assert route.ended == route.begun  # never before
    assert collector.headers[0]["x-team"] == "blue"
    assert not spans.on


def test_what_is_not_sampled_is_not_recorded_here_nor_behind(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        spans, now = Spans(), time.monotonic()
        spans.begin("frontend")
        assert spans.open("chat m", UNSAMPLED, now, dict) is None
        assert spans.wanted(UNSAMPLED) == ""
        spans.record("encode", UNSAMPLED, now, now, {})
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
        other = Spans()
        other.begin("frontend")
        assert other.open("chat m", "", now, dict) is None
        unwanted = other.open("chat m", SAMPLED, now, dict)
        assert unwanted is not None  # who is behind is told that this trace is not wanted
        unwanted.end({})
        assert not is_sampled(unwanted.traceparent)
        other.record("encode", SAMPLED, now, now, {})  # below a span of another program's
        spans.end()
        other.end()
        assert collector.spans == []


@pytest.mark.parametrize(
    ("sampler", "ratio", "asks"),
    [
        ("parentbased_always_on", "", False),
        ("parentbased_always_off", "", False),
        ("parentbased_traceidratio", "0.3", False),
        ("always_on", "", True),
        ("traceidratio", "0.3", True),
    ],
)
@pytest.mark.parametrize("client", ["", SAMPLED, UNSAMPLED, f"00-{TRACE}-00f067aa0ba902b7-03"])
def test_a_request_is_sampled_as_the_sampler_of_the_sdk_says(
    sampler: str, ratio: str, asks: bool, client: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", ratio)
    ids = KnownIds()
    provider, asked = TracerProvider(shutdown_on_exit=False, id_generator=ids), []

    def facts() -> Attributes:
        asked.append(None)
        return {}

    requests, drawn = RequestSampler(provider), set()
    parent = NonRecordingSpan(context_of(client)) if client else None
    context = set_span_in_context(parent, Context()) if parent else Context()
    flags = int(client[53:] or "0", 16)
    for _ in range(200):
        begun = requests.begin("chat m", client, facts)
        trace = int(client[3:35], 16) if client else ids.trace
        result = provider.sampler.should_sample(context, trace, "chat m")
        sampled = result.decision is Decision.RECORD_AND_SAMPLE
        drawn.add(sampled)
        if begun is None:
            assert not sampled
            assert not flags & 1
        else:
            assert begun.is_sampled is sampled
            assert begun.traceparent == f"00-{trace:032x}-{ids.span:016x}-{flags & 2 | sampled:02x}"
            assert begun.parent == (client or f"00-{trace:032x}-{0:016x}-01")
    assert len(drawn) == (2 if ratio and not client else 1)
    assert len(asked) == (200 if asks else 0)


class KnownIds(RandomIdGenerator):
    """Tells what it drew last."""

    trace = span = 0

    def generate_trace_id(self) -> int:
        self.trace = super().generate_trace_id()
        return self.trace

    def generate_span_id(self) -> int:
        self.span = super().generate_span_id()
        return self.span


def stages() -> list[Stage]:
    """Of each form: a stage, one that failed, requests with a parent and without one."""
    facts = {"z": -1, "a": 7 << 40, "b": True, "c": 0.5, "d": "é", "e": ["stop", "length"]}
    stage = Stage("encode", SAMPLED, 1.5, 2.25, facts, "")
    failed = Stage("route", SAMPLED, 2.0, 1.0, {}, "ValueError")
    root = Stage("chat 100 % m", f"00-{TRACE}-{0:016x}-01", 1.0, 3.0, facts, "timeout_error")
    child = Stage("chat m", SAMPLED, 1.0, 3.0, facts, "")
    root.own_id = child.own_id = 0xAB
    child.event = "first token", 2.0
    return [stage, failed, root, child]


@pytest.mark.parametrize("stage", stages(), ids=["stage", "failed", "root", "child"])
def test_what_is_written_is_what_the_sdk_writes(stage: Stage) -> None:
    facts = BoundedAttributes(5, stage.facts)
    new_id = bytes.fromhex("01020304050607cd")
    encoded = stage.encoded(new_id, facts, 10**18, facts.dropped)
    (written,) = otlp.ScopeSpans.FromString(encoded).spans
    same = sdk_span(stage, new_id, facts, 10**18, Resource({}))
    (expected,) = encode_spans([same]).resource_spans[0].scope_spans[0].spans
    if not stage.error:
        expected.ClearField("status")  # it is there, but empty
    assert written == expected


def test_the_installed_exporter_takes_bytes() -> None:
    exporter = StageExporter(OTLPSpanExporter(), TracerProvider(), SpanLimits())
    assert exporter._send is not None
    exporter.shutdown()


def test_spans_go_over_the_proxy_that_the_environment_names(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with collecting() as proxy:
        monkeypatch.setenv("http_proxy", proxy.url)
        monkeypatch.setenv("no_proxy", "127.0.0.1")
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://collector.invalid:4318")
        spans = Spans()
        spans.begin("router")
        spans.record("route", SAMPLED, 0.0, 1.0, {})
        proxy.await_names(TRACE, {"route"})
        spans.end()


def test_a_process_that_ends_exports_its_last_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "3600000")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        monkeypatch.setattr("penstock.protocol.process.spans.LAST_SECONDS", 60.0)
        spans = Spans()
        spans.begin("router")
        for _ in range(600):  # more than a batch
            spans.record("route", SAMPLED, 0.0, 1.0, {})
        spans.end()
        assert len(collector.spans) == 600
        assert len({span.id for span in collector.spans}) == 600


@pytest.mark.parametrize("prefix", ["OTEL_", "OTEL_SPAN_"])
def test_the_standard_limits_hold_for_requests_and_their_stages(
    prefix: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(f"{prefix}ATTRIBUTE_COUNT_LIMIT", "2")
    monkeypatch.setenv(f"{prefix}ATTRIBUTE_VALUE_LENGTH_LIMIT", "4")
    with collecting() as collector:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", collector.url)
        spans, now = Spans(), time.monotonic()
        spans.begin("frontend")
        given = {"penstock.a": 1, "penstock.b": "longer than four", "penstock.c": ("longer", "x")}
        request = spans.open("chat m", SAMPLED, now, lambda: given)
        assert request is not None
        spans.record("encode", request.traceparent, now, now, given)
        request.end({})
        found = {s.name: s for s in collector.await_names(TRACE, {"chat m", "encode"})}
        spans.end()
    newest = {"penstock.b": "long", "penstock.c": ["long", "x"]}
    for span in found.values():
        assert span.attributes == newest
        assert span.dropped == 1


def test_the_standard_variable_turns_all_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    spans = Spans()
    spans.begin("frontend")
    assert not spans.on
    assert spans.open("chat m", SAMPLED, 0.0, dict) is None


def test_who_records_only_puts_a_stage_into_the_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    spans, now = Spans(), time.monotonic()
    spans.begin("scheduler")
    facts = {f"penstock.{number}": number for number in range(8)}
    assert calls(lambda: spans.record("decode", SAMPLED, now, now, facts)) < 25
    spans.end()


def test_without_a_collector_recording_and_ending_wait_for_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "64")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "64")
    spans, now = Spans(), time.monotonic()
    spans.begin("router")
    began = time.thread_time()
    for _ in range(1000):
        spans.record("route", SAMPLED, now, now, {})
    assert time.thread_time() - began < 5.0
    spans.end()
    assert time.monotonic() - now < 60.0


def test_the_oldest_spans_make_room_and_the_log_says_how_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[str, dict[str, Any]]] = []
    monkeypatch.setattr(logs, "record", lambda _, event, fields: told.append((event, fields)))
    sent: list[Stage] = []
    exporter = SimpleNamespace(export=sent.extend, shutdown=lambda: None)
    queue = StageQueue(exporter, 4, 5, 3600.0)  # no batch is ever whole
    for place in range(7):
        queue.add(Stage("route", SAMPLED, place, place, {}, ""))
    queue.end(60.0)
    assert [stage.began for stage in sent] == [3, 4, 5, 6]
    assert told == [("spans dropped", {"count": 3, "queue": 4})]


def test_who_records_while_another_thread_ends_it_all_is_not_hurt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    spans = Spans()
    spans.begin("tokenizer")

    def ending(traceparent: str) -> bool:
        spans.end()
        return is_sampled(traceparent)

    monkeypatch.setattr("penstock.protocol.process.spans.is_sampled", ending)
    spans.record("encode", SAMPLED, 0.0, 1.0, {})
    assert not spans.on
