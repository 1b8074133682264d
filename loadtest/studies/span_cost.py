"""What the spans of one request take, in this process alone.

    python -m penstock.loadtest.studies.span_cost
    OTEL_TRACES_SAMPLER=parentbased_traceidratio OTEL_TRACES_SAMPLER_ARG=0.1 python -m …

The spans are those that all processes of a server make of a chat of one choice, with their usual
attributes, written and sent to a collector in another process, in whole batches of the SDK. The
times are CPU of all threads, so hardly anything of what else the machine does is in them.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from penstock.loadtest.studies.span_receiver import span_receiver
from penstock.protocol.process.spans import Spans
from penstock.protocol.process.stage import Attributes

REQUESTS = 192
"""Of a turn: three of the SDK's batches."""
TURNS, WARM_TURNS = 40, 5
OPENED: Attributes = {
    "gen_ai.operation.name": "chat", "gen_ai.provider.name": "penstock",
    "gen_ai.request.model": "penstock-demo", "penstock.request_id": "req-0123456789abcdef01234567",
    "penstock.stream": True, "gen_ai.request.max_tokens": 128,
}  # fmt: skip
CLOSED: Attributes = {
    "gen_ai.response.model": "penstock-demo", "gen_ai.usage.input_tokens": 77,
    "gen_ai.usage.cache_read.input_tokens": 64, "gen_ai.usage.output_tokens": 128,
    "gen_ai.response.finish_reasons": ("length",), "penstock.continuations": 0,
}  # fmt: skip
CHOICE: Attributes = {"penstock.choice": 0, "penstock.attempt": 1}
STAGES: tuple[tuple[str, Attributes], ...] = (
    ("route", {"penstock.to": "tokenizer-0", "penstock.attempt": 1}),
    ("route", {"penstock.to": "scheduler-0", "penstock.attempt": 1}),
    ("encode", {"penstock.attempt": 1, "penstock.prompt_tokens": 77}),
    ("queue", CHOICE),
    ("prefill", {**CHOICE, "penstock.prompt_tokens": 77, "penstock.cached_tokens": 64}),
    ("decode", {**CHOICE, "gen_ai.usage.output_tokens": 128, "penstock.preemptions": 0}),
    ("compute prompt", {"penstock.slot": 1, "penstock.cached_positions": 64}),
)


def _request(spans: Spans) -> None:
    now = time.monotonic()
    span = spans.open("chat penstock-demo", "", now, lambda: dict(OPENED))
    if span is None:
        raise RuntimeError("OTEL_SDK_DISABLED is set: there are no spans")
    if trace := spans.wanted(span.traceparent):
        for name, facts in STAGES:
            spans.record(name, trace, now, now, dict(facts))
    span.event("first token", now)
    span.end(dict(CLOSED))


def _turn(spans: Spans, flush: Callable[[], object]) -> tuple[float, float]:
    """Microseconds of a request: all, and in the thread that records."""
    began, own_began = time.process_time(), time.thread_time()
    for _ in range(REQUESTS):
        _request(spans)
    own = time.thread_time() - own_began
    flush()
    return (time.process_time() - began) / REQUESTS * 1e6, own / REQUESTS * 1e6


def main() -> None:
    with span_receiver() as collector:
        os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = collector
        spans = Spans()
        spans.begin("frontend")
        turns = [_turn(spans, spans.flush) for _ in range(WARM_TURNS + TURNS)][WARM_TURNS:]
        every, own = (sorted(one[place] for one in turns) for place in (0, 1))
        low, middle, high = (every[TURNS * part // 4] for part in (1, 2, 3))
        print(f"spans of a request: {middle:.1f} µs ({low:.1f} to {high:.1f})")
        print(f"of that in the thread that records them: {own[TURNS // 2]:.1f} µs")
        spans.end()


if __name__ == "__main__":
    main()
