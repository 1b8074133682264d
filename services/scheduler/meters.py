"""What the scheduler counts of its engine, for ``/metrics``."""

from __future__ import annotations

import time

from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.spans import SPANS
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.sequence import Sequence
from penstock.services.scheduler.stats import SchedulerStats


def _record(sequence: Sequence) -> None:
    """The spans of a traced sequence that is over."""
    request, now = sequence.request, time.monotonic()
    started, first, trace = sequence.started_at, sequence.first_token_at, request.trace
    facts = {"penstock.choice": sequence.choice, "penstock.attempt": request.attempt}
    SPANS.record("queue", trace, request.queued_at, started or now, facts)
    if started:
        prompt = {
            "penstock.prompt_tokens": sequence.prompt_len,
            "penstock.cached_tokens": max(0, sequence.cached_tokens),
        }
        SPANS.record("prefill", trace, started, first or now, facts | prompt)
    if first:
        output = {
            "gen_ai.usage.output_tokens": sequence.num_output,
            "penstock.preemptions": sequence.preemptions,
        }
        SPANS.record("decode", trace, first, now, facts | output)


class EngineMeters:
    """The series of one engine. ``part`` of a step's time is one addition."""

    def __init__(self, registry: Registry, model: str) -> None:
        self._registry = registry
        self._model = model
        self.step_seconds = registry.histogram("step_seconds").observe
        self._sequences = registry.histogram("step_sequences").observe
        self._tokens = registry.histogram("step_tokens").observe
        self._queue = registry.histogram("request_queue_seconds").observe_traced
        self._prefill = registry.histogram("request_prefill_seconds").observe_traced
        self._decode = registry.histogram("request_decode_seconds").observe_traced
        self.plan, self.send, self.take, self.hand_out = (
            registry.counter("step_part_seconds_total", part)
            for part in ("plan", "send", "apply", "hand_out")
        )

    def follow(self, core: SchedulerCore) -> None:
        """Count the steps and the ends of a core."""
        core.on_step = self.step
        core.follow_ends(self.closed)

    def step(self, sequences: int, tokens: int) -> None:
        self._sequences(sequences)
        self._tokens(tokens)

    def closed(self, sequence: Sequence) -> None:
        """A sequence is over. One that never ran is told of by the queue's age alone."""
        if sequence.request.trace:
            _record(sequence)
        if not sequence.started_at:
            return
        trace_id = sequence.request.head.trace[3:35]
        self._queue(sequence.queued_s, trace_id)
        if first := sequence.first_token_at:
            self._prefill(first - sequence.started_at, trace_id)
            self._decode(time.monotonic() - first, trace_id)

    def report(self, stats: SchedulerStats, queue_age: float) -> None:
        """Take in a snapshot, a few times a second."""
        metrics, counters = self._registry, stats.counters
        metrics.set("requests_running", stats.running)
        for reason, count in stats.waiting_for.items():
            metrics.set("requests_waiting", count, reason)
        metrics.set("kv_blocks_used", stats.blocks_used)
        metrics.set("kv_blocks_cached", stats.blocks_cached)
        metrics.set("kv_blocks", stats.blocks_total)
        metrics.set("kv_usage_ratio", stats.blocks_used / max(1, stats.blocks_total))
        metrics.set("queue_depth", stats.waiting, "scheduler")
        metrics.set("queue_age_seconds", queue_age, "scheduler", self._model)
        for name, value in (
            ("prefix_cache_query_tokens_total", counters.prefix_query_tokens),
            ("prefix_cache_hit_tokens_total", counters.prefix_hit_tokens),
            ("preemptions_total", counters.preemptions),
            ("prompt_tokens_total", counters.prompt_tokens),
            ("generation_tokens_total", counters.generated_tokens),
            ("steps_total", counters.steps),
            ("failed_steps_total", counters.failed_steps),
        ):
            metrics.counter(name).value = float(value)
