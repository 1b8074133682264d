"""Every metric of every service, declared once, and the little that counts them.

A process keeps one ``Registry`` and puts ``registry.report()`` (absolute values) into its beats.
The router keeps the newest report of each process and the total of the dead (``merge``); every
frontend renders the same snapshot (``render``), so ``/metrics`` does not depend on which frontend
answers.

The text format is Prometheus 0.0.4:
https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable
from typing import Literal

import msgspec

from penstock.protocol.wire.messages.membership import (
    MetricSample,
    MetricsAnswer,
    MetricsReport,
)

PREFIX = "penstock:"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
MAX_SERIES = 512
"""Label combinations kept of one metric; further ones are counted under ``other``."""

Kind = Literal["counter", "gauge", "histogram"]


class Metric(msgspec.Struct, frozen=True):
    """One metric. ``name`` lacks the prefix ``penstock:``, which only ``render`` adds."""

    name: str
    kind: Kind
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets, ascending, without the infinite one."""
    by_process: bool = False
    """A gauge whose sum over processes says nothing: rendered with a ``process`` label."""
    largest: bool = False
    """A gauge of which the largest of all processes counts, not their sum."""


_LATENCY = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 0.75),
    *(1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_TOKEN_LATENCY = (
    *(0.0005, 0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.008, 0.01, 0.0125, 0.015, 0.02),
    *(0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0),
)
_STEP_SECONDS = (0.0001, 0.0002, *_TOKEN_LATENCY, 10.0, 30.0)

_DECLARED = (
    # Engine (scheduler and worker).
    Metric("num_requests_running", "gauge", "Sequences in the running batch."),
    Metric("num_requests_waiting", "gauge", "Requests that wait for a place in the batch."),
    Metric("kv_blocks_used", "gauge", "KV blocks that running sequences hold."),
    Metric("kv_blocks_total", "gauge", "KV blocks in all."),
    Metric("prefix_cache_query_tokens_total", "counter", "Prompt tokens looked up in the cache."),
    Metric("prefix_cache_hit_tokens_total", "counter", "Prompt tokens found in the prefix cache."),
    Metric("preemptions_total", "counter", "Sequences that lost their KV blocks to others."),
    Metric("prompt_tokens_total", "counter", "Prompt tokens of accepted requests."),
    Metric("generation_tokens_total", "counter", "Tokens generated."),
    Metric("steps_total", "counter", "Steps executed."),
    Metric("step_seconds", "histogram", "Time of one step in the worker.", (), _STEP_SECONDS),
    Metric("engine_info", "gauge", "1 for each worker with a model.", ("device", "dtype")),
    Metric(
        "spec_decode_draft_tokens_total",
        "counter",
        "Tokens that were drafted ahead and verified, by where they came from (own: the text "
        "itself, finished: outputs of the tenant, grammar: forced) and by their place in the "
        "draft, from 0.",
        ("source", "position"),
    ),
    Metric(
        "spec_decode_accepted_tokens_total",
        "counter",
        "Of them, those that the model drew too.",
        ("source", "position"),
    ),
    Metric(
        "spec_decode_saved_seconds",
        "gauge",
        "What steps with drafts would have taken longer without, by measured steps without.",
    ),
    Metric("failed_steps_total", "counter", "Steps that raised or never came back."),
    # Requests on their way to an engine (router).
    Metric(
        "requests_placed_total",
        "counter",
        "Requests placed on one of several engines, by reason: prefix (it has cached some of the "
        "prompt), load (those that have are too busy), room (none has).",
        ("reason",),
    ),
    # Requests, as the client sees them (frontend).
    Metric(
        "time_to_first_token_seconds",
        "histogram",
        "From the arrival of a request to its first token.",
        (),
        _LATENCY,
    ),
    Metric(
        "inter_token_latency_seconds",
        "histogram",
        "Time between two tokens of one choice.",
        (),
        _TOKEN_LATENCY,
    ),
    Metric(
        "e2e_request_latency_seconds",
        "histogram",
        "From the arrival of a request to its last token.",
        (),
        _LATENCY,
    ),
    Metric(
        "request_finished_total",
        "counter",
        "Choices that ended, by reason: stop, length, abort, error, rejected.",
        ("reason",),
    ),
    Metric(
        "http_requests_total",
        "counter",
        "Answers to requests, over HTTP and on WebSockets: one on a WebSocket counts under the "
        "route and the status that HTTP would have given; 101 counts WebSockets that closed.",
        ("route", "status"),
    ),
    Metric(
        "grpc_requests_total",
        "counter",
        "Answers to calls over gRPC.",
        ("method", "code"),
    ),
    Metric(
        "requests_limited_total",
        "counter",
        "Requests that a limit of their key refused: requests or tokens a minute, tokens a day, "
        "or concurrent ones.",
        ("limit",),
    ),
    # Every service.
    Metric("queue_depth", "gauge", "Requests that wait at a hop of the pipeline.", ("hop",)),
    Metric(
        "queue_age_seconds",
        "gauge",
        "How long what waits at a hop of the pipeline has waited, of the process where it waits "
        "longest: at frontend for the event loop, at tokenizer for its event loop or to be "
        "encoded, at router for a process to send it to, at scheduler to be started. model is "
        "empty for frontends and the router.",
        ("hop", "model"),
        largest=True,
    ),
    Metric("continuations_total", "counter", "Requests continued after a loss.", ("service",)),
    Metric("dropped_messages_total", "counter", "Messages dropped, by reason.", ("reason",)),
    Metric("malformed_frames_total", "counter", "Frames that did not decode."),
    Metric("outbox_bytes", "gauge", "Bytes that wait for slow peers.", by_process=True),
)

METRICS: dict[str, Metric] = {metric.name: metric for metric in _DECLARED}


class Counter:
    """One series that only grows."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def inc(self, amount: float = 1.0) -> None:
        self.value += amount


class Gauge:
    """One series that moves both ways."""

    __slots__ = ("value",)

    def __init__(self) -> None:
        self.value = 0.0

    def set(self, value: float) -> None:
        self.value = value

    def add(self, amount: float) -> None:
        self.value += amount


class Histogram:
    """One series of observations, counted by bucket."""

    __slots__ = ("_above", "_bucket", "_limits", "_most", "bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self._limits = (-math.inf, *bounds, math.inf)
        # Values that come together, as those of all rows of a step, mostly share a bucket.
        self._bucket = 0
        self._above, self._most = self._limits[:2]

    def observe(self, value: float, count: int = 1) -> None:
        """Count ``value`` (an upper bound belongs to its bucket) ``count`` times."""
        if not self._above < value <= self._most:
            self._bucket = bucket = bisect_left(self.bounds, value)
            self._above, self._most = self._limits[bucket], self._limits[bucket + 1]
        self.counts[self._bucket] += count
        self.total += value * count


Series = Counter | Gauge | Histogram


class Registry:
    """The metrics of one process.

    Hot paths keep the series that ``counter``, ``gauge`` and ``histogram`` return. Writing is for
    one thread; ``report`` may be called from another (a beat thread), where it sees each value
    whole. A name that is not declared, a wrong kind or a wrong number of labels is a programming
    error and raises ``ValueError``.
    """

    def __init__(self) -> None:
        self._series: dict[tuple[str, tuple[str, ...]], Series] = {}
        self._sizes: dict[str, int] = {}

    def _get(self, name: str, kind: Kind, labels: tuple[str, ...]) -> Series:
        found = self._series.get((name, labels))
        metric = METRICS.get(name)
        if metric is None or metric.kind != kind or len(labels) != len(metric.labels):
            raise ValueError(f"{name}{labels} is not a declared {kind}; see METRICS")
        if found is not None:
            return found
        size = self._sizes.get(name, 0)
        if size >= MAX_SERIES:
            labels = ("other",) * len(labels)
            if (found := self._series.get((name, labels))) is not None:
                return found
        self._sizes[name] = size + 1
        made: Series
        if kind == "histogram":
            made = Histogram(metric.buckets)
        else:
            made = Counter() if kind == "counter" else Gauge()
        self._series[name, labels] = made
        return made

    def counter(self, name: str, *labels: str) -> Counter:
        found = self._get(name, "counter", labels)
        if not isinstance(found, Counter):
            raise ValueError(f"{name} is not a counter")
        return found

    def gauge(self, name: str, *labels: str) -> Gauge:
        found = self._get(name, "gauge", labels)
        if not isinstance(found, Gauge):
            raise ValueError(f"{name} is not a gauge")
        return found

    def histogram(self, name: str, *labels: str) -> Histogram:
        found = self._get(name, "histogram", labels)
        if not isinstance(found, Histogram):
            raise ValueError(f"{name} is not a histogram")
        return found

    def inc(self, name: str, *labels: str, amount: float = 1.0) -> None:
        """Add to a counter: ``inc("dropped_messages_total", "fenced")``."""
        self.counter(name, *labels).value += amount

    def set(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge: ``set("queue_depth", 3, "router")``."""
        self.gauge(name, *labels).value = value

    def observe(self, name: str, value: float, *labels: str) -> None:
        """Add one observation to a histogram."""
        self.histogram(name, *labels).observe(value)

    def report(self) -> MetricsReport:
        """Absolute values of all series so far."""
        samples = []
        for (name, labels), series in list(self._series.items()):
            if isinstance(series, Histogram):
                values = [*map(float, series.counts), series.total]
            else:
                values = [float(series.value)]
            samples.append(MetricSample(name, list(labels), values))
        return MetricsReport(samples)


def _num_values(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


def _usable(sample: MetricSample) -> Metric | None:
    """The declaration of a sample, or None where the sample does not fit it."""
    metric = METRICS.get(sample.name)
    if metric is None or len(sample.labels) != len(metric.labels):
        return None
    return metric if len(sample.values) == _num_values(metric) else None


_Table = dict[tuple[str, tuple[str, ...]], list[float]]


def _add(table: _Table, key: tuple[str, tuple[str, ...]], values: list[float]) -> None:
    so_far = table.get(key)
    if so_far is None:
        table[key] = list(values)
    elif METRICS[key[0]].largest:
        table[key] = list(map(max, so_far, values))
    else:
        table[key] = [a + b for a, b in zip(so_far, values, strict=True)]


def merge(reports: Iterable[MetricsReport]) -> MetricsReport:
    """One report in place of many: series with the same name and labels are summed, and of gauges
    declared ``largest`` the largest is taken.

    Samples that do not fit their declaration are left out, and so are gauges declared
    ``by_process``, whose sum says nothing. For the total of dead processes see also ``render``,
    which ignores their gauges.
    """
    table: _Table = {}
    for report in reports:
        for sample in report.samples:
            metric = _usable(sample)
            if metric is not None and not metric.by_process:
                _add(table, (sample.name, tuple(sample.labels)), sample.values)
    return MetricsReport([MetricSample(n, list(labels), v) for (n, labels), v in table.items()])


def _collect(answer: MetricsAnswer) -> dict[str, dict[tuple[str, ...], list[float]]]:
    """Values by metric and label values; a ``by_process`` gauge has the process as last label."""
    table: _Table = {}
    for process in answer.processes:
        for sample in process.report.samples:
            metric = _usable(sample)
            if metric is None or (metric.kind == "gauge" and process.incarnation == 0):
                continue  # a dead process holds nothing any more
            labels = tuple(sample.labels)
            if metric.by_process:
                labels = (*labels, f"{process.service}-{process.incarnation:x}")
            _add(table, (sample.name, labels), sample.values)
    found: dict[str, dict[tuple[str, ...], list[float]]] = {}
    for (name, labels), values in table.items():
        found.setdefault(name, {})[labels] = values
    return found


def _number(value: float) -> str:
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)


def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _labels(names: tuple[str, ...], values: tuple[str, ...], bound: str = "") -> str:
    pairs = [f'{n}="{_escape(v)}"' for n, v in zip(names, values, strict=True)]
    if bound:
        pairs.append(f'le="{bound}"')
    return f"{{{','.join(pairs)}}}" if pairs else ""


def _render_histogram(
    metric: Metric, names: tuple[str, ...], labels: tuple[str, ...], values: list[float]
) -> list[str]:
    full = PREFIX + metric.name
    lines = []
    count = 0.0
    bounds = (*map(str, metric.buckets), "+Inf")
    for bound, in_bucket in zip(bounds, values[:-1], strict=True):
        count += in_bucket
        lines.append(f"{full}_bucket{_labels(names, labels, bound)} {_number(count)}")
    lines.append(f"{full}_sum{_labels(names, labels)} {_number(values[-1])}")
    lines.append(f"{full}_count{_labels(names, labels)} {_number(count)}")
    return lines


def render(answer: MetricsAnswer) -> bytes:
    """Prometheus text for a snapshot of all processes.

    Counters and histograms are summed over processes, living and dead; gauges over the living, of
    which only the largest counts where the metric says so.
    A metric without labels that nobody reported yet is rendered as zero.
    """
    found = _collect(answer)
    lines: list[str] = []
    for metric in METRICS.values():
        series = found.get(metric.name, {})
        if not series and not metric.labels and not metric.by_process:
            series = {(): [0.0] * _num_values(metric)}
        full = PREFIX + metric.name
        names = (*metric.labels, "process") if metric.by_process else metric.labels
        lines.append(f"# HELP {full} {metric.help}")
        lines.append(f"# TYPE {full} {metric.kind}")
        for labels, values in sorted(series.items()):
            if metric.kind == "histogram":
                lines.extend(_render_histogram(metric, names, labels, values))
            else:
                lines.append(f"{full}{_labels(names, labels)} {_number(values[0])}")
    return ("\n".join(lines) + "\n").encode()
