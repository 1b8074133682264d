"""What the scheduler counts of its engine, for ``/metrics``."""

from __future__ import annotations

import time
from collections.abc import Callable

from penstock.protocol.process import logs
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.spans import SPANS
from penstock.protocol.trace_context import exemplar_id, log_fields
from penstock.services.scheduler.core import SchedulerCore
from penstock.services.scheduler.planned_step import Step
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
            "penstock.prompt_tokens": sequence.shown_prompt_len,
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
        self._seconds = registry.histogram("step_seconds").observe
        self._sequences = registry.histogram("step_sequences").observe
        self._tokens = registry.histogram("step_tokens").observe
        self._queue = registry.histogram("request_queue_seconds").observe_traced
        self._prefill = registry.histogram("request_prefill_seconds").observe_traced
        self._decode = registry.histogram("request_decode_seconds").observe_traced
        self.plan, self.send, self.take, self.hand_out = (
            registry.counter("step_part_seconds_total", part)
            for part in ("plan", "send", "apply", "hand_out")
        )

    def follow(self, core: SchedulerCore, *first_tokens: Callable[[Sequence], None]) -> None:
        """Count the steps of a core, and what its sequences wait for. ``first_tokens``: who else
        hears of each sequence that has its first token here."""

        def first_token(sequence: Sequence) -> None:
            self.had_first_token(sequence)
            for hear in first_tokens:
                hear(sequence)

        core.on_step = self.step
        heard = first_token if first_tokens else self.had_first_token
        core.follow_sequences(self.started, heard, self.closed)

    def step(self, step: Step, seconds: float) -> None:
        self._seconds(seconds)
        self._sequences(step.num_decoding + len(step.chunks))
        self._tokens(step.num_decoding + step.num_prefilled)

    def started(self, sequence: Sequence) -> None:
        """A sequence runs for the first time here. Of one that another engine had begun, the time
        since its arrival is mostly that of its run there."""
        head = sequence.request.head
        if not head.accepted:
            self._queue(sequence.queued_s, exemplar_id(head.trace))

    def had_first_token(self, sequence: Sequence) -> None:
        """A sequence has its first token here. One that another engine had begun computes its
        output so far as well, which is no prefill of a prompt."""
        head = sequence.request.head
        if not head.accepted:
            seconds = sequence.first_token_at - sequence.started_at
            self._prefill(seconds, exemplar_id(head.trace))

    def closed(self, sequence: Sequence) -> None:
        """A sequence is over, whether it ever had a token or not."""
        request = sequence.request
        if request.trace:
            _record(sequence)
        if logs.wants("debug"):
            facts = {
                "choice": sequence.choice,
                "attempt": request.attempt,
                "output_tokens": sequence.num_output,
            }
            logs.record("debug", "choice ended", facts | log_fields(request.head))
        if first := sequence.first_token_at:
            self._decode(time.monotonic() - first, exemplar_id(request.head.trace))

    def report(self, stats: SchedulerStats, queue_age: float) -> None:
        """Take in a snapshot, a few times a second."""
        metrics, counters = self._registry, stats.counters
        metrics.set("requests_running", stats.running)
        for reason, count in stats.waiting_for.items():
            metrics.set("requests_waiting", count, reason)
        metrics.set("kv_blocks_used", stats.blocks_used)
        metrics.set("kv_blocks_cached", stats.blocks_cached)
        metrics.set("kv_blocks_retained", stats.blocks_retained)
        metrics.set("kv_blocks", stats.blocks_total)
        metrics.set("kv_usage_ratio", stats.blocks_used / max(1, stats.blocks_total))
        metrics.set("queue_depth", stats.waiting, "scheduler")
        metrics.set("queue_age_seconds", queue_age, "scheduler", self._model)
        for name, value in (
            ("prefix_cache_query_tokens_total", counters.prefix_query_tokens),
            ("prefix_cache_hit_tokens_total", counters.prefix_hit_tokens),
            ("kv_retentions_cut_total", counters.cut_retentions),
            ("preemptions_total", counters.preemptions),
            ("prompt_tokens_total", counters.prompt_tokens),
            ("generation_tokens_total", counters.generated_tokens),
            ("steps_total", counters.steps),
            ("failed_steps_total", counters.failed_steps),
        ):
            metrics.counter(name).value = float(value)
