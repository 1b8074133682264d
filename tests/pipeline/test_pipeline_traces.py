"""One request followed through every process, in a collector and in the logs."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from support.otlp_receiver import Received, collecting
from support.pipeline.served import Served
from support.polling import until

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
STAGES = {"encode", "route", "queue", "prefill", "decode", "compute prompt"}

pytestmark = pytest.mark.slow


def ask(server: Served, trace: str, tokens: int) -> Any:
    status, answer = server.post(
        "/v1/chat/completions",
        {
            "model": "penstock-demo",
            "messages": [{"role": "user", "content": "secret words"}],
            "max_tokens": tokens,
            "ignore_eos": True,
        },
        {"x-request-id": "followed-1", "traceparent": f"00-{trace}-{PARENT}-01"},
    )
    assert status == 200, answer
    return answer


def chain(spans: list[Received], span: Received) -> list[str]:
    """Names from a span up to the client's."""
    by_id = {one.id: one for one in spans}
    names = [span.name]
    while (parent := by_id.get(span.parent)) is not None:
        names.append(parent.name)
        span = parent
    assert span.parent == PARENT
    return names


def test_one_trace_holds_the_stages_of_a_request_in_all_processes_also_after_a_loss() -> None:
    with collecting() as collector:
        server = Served(
            *("--device", "null", "--null-step-ms", "20", "--otel-traces"),
            *("--log-level", "debug"),
            environment={
                "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
                "OTEL_BSP_SCHEDULE_DELAY": "100",
            },
        )
        try:
            own = "chat penstock-demo"
            answer = ask(server, TRACE, 8)
            spans = collector.await_names(TRACE, {own, *STAGES})
            assert {span.process for span in spans} == {
                *("frontend", "tokenizer", "router", "scheduler", "worker")
            }
            (request,) = (span for span in spans if span.name == own)
            assert request.parent == PARENT
            assert all(chain(spans, one)[1:] in ([], [own]) for one in spans)
            assert request.attributes["gen_ai.usage.output_tokens"] == 8
            assert (
                request.attributes["gen_ai.usage.input_tokens"]
                == (answer["usage"]["prompt_tokens"])
            )
            assert request.attributes["gen_ai.response.finish_reasons"] == ["length"]
            assert "secret" not in repr(spans)
            assert [s.attributes["penstock.to"] for s in spans if s.name == "route"] == [
                *("tokenizer-0", "scheduler-0")
            ]
            loss_continues_in_the_same_trace(server, collector)
        finally:
            server.kill()
    lines = [json.loads(line) for line in server.lines if line.startswith("{")]
    about = [one for one in lines if one.get("id") == "followed-1" and one["trace"] == TRACE]
    assert {one["service"]: one["event"] for one in about} == {
        "frontend": "request",
        "tokenizer": "request encoded",
        "scheduler": "choice ended",
    }


def loss_continues_in_the_same_trace(server: Served, collector: Any) -> None:
    other = "ab" * 16
    asking = threading.Thread(target=ask, args=(server, other, 100))
    asking.start()
    until(lambda: server.metrics().get("penstock_generation_tokens_total", 0.0) >= 20)
    (scheduler,) = (
        one for one in server.processes().values() if server.role_of(one) == "scheduler"
    )
    scheduler.kill()
    asking.join(60)
    assert not asking.is_alive()
    spans = collector.await_names(other, {"chat penstock-demo", "continuation", "decode"})
    (continued,) = (span for span in spans if span.name == "continuation")
    assert continued.process == "tokenizer"
    assert continued.attributes["penstock.lost"] == "engine"
    assert continued.ended > continued.begun
    (request,) = (span for span in spans if span.name == "chat penstock-demo")
    assert request.attributes["gen_ai.usage.output_tokens"] == 100


def test_a_collector_that_is_away_ends_no_request() -> None:
    server = Served(
        *("--device", "null", "--otel-traces"),
        environment={"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"},
    )
    try:
        for _ in range(20):
            assert ask(server, TRACE, 4)["usage"]["completion_tokens"] == 4
    finally:
        server.kill()
