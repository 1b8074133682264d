"""``/metrics``: what all processes have counted, in Prometheus' text format or OpenMetrics.

OpenMetrics has exemplars: of buckets of latencies, the id of a trace that fell into each.
Which of the two a client gets, its ``Accept`` says (RFC 9110, section 12.5.1).
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import generate_latest as as_text
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as as_openmetrics
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as FamilyExemplar

from penstock.protocol.process.metric_declarations import METRICS, PREFIX, Metric
from penstock.protocol.process.metrics import Totals, collect
from penstock.protocol.wire.messages.membership import MetricsAnswer

TEXT = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_OPENMETRICS_VERSIONS = frozenset({"", "1.0.0"})


class PipelineCollector(Collector):
    """A snapshot of all processes, as ``prometheus_client`` asks for metrics."""

    def __init__(self, answer: MetricsAnswer) -> None:
        self._answer = answer

    def collect(self) -> Iterable[Family]:
        found = collect(self._answer)
        for metric in METRICS.values():
            family = _family(metric)
            for labels, totals in sorted(found[metric.name].items()):
                _add(family, metric, labels, totals)
            yield family


def _family(metric: Metric) -> Family:
    names = (*metric.labels, "process") if metric.by_process else metric.labels
    full = PREFIX + metric.name
    if metric.kind == "histogram":
        return HistogramMetricFamily(full, metric.help, labels=names)
    if metric.kind == "counter":
        return CounterMetricFamily(full, metric.help, labels=names)
    return GaugeMetricFamily(full, metric.help, labels=names)


def _add(family: Family, metric: Metric, labels: tuple[str, ...], totals: Totals) -> None:
    values = totals.values
    if isinstance(family, HistogramMetricFamily):
        bounds = (*map(str, metric.buckets), "+Inf")
        buckets: list[tuple[str, float] | tuple[str, float, FamilyExemplar]] = []
        count = 0.0
        for place, bound in enumerate(bounds):
            count += values[place]
            found = totals.exemplars.get(place)
            if found is None:
                buckets.append((bound, count))
            else:
                example = FamilyExemplar({"trace_id": found.trace_id}, found.value, found.at)
                buckets.append((bound, count, example))
        family.add_metric(labels, buckets, values[-1])
    elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
        family.add_metric(labels, values[0])


def _qualities(accept: str) -> tuple[float, float]:
    """(of the text format, of OpenMetrics): what a client prefers, 0 to 1.

    Ranges that cannot be read, and versions that are not written here, count for nothing.
    """
    named, openmetrics, anything = 0.0, 0.0, 0.0
    for media_range in accept.split(","):
        kind, *rest = (part.strip().lower() for part in media_range.split(";"))
        given = dict(part.partition("=")[::2] for part in rest)
        quality = _quality(given.get("q", "1"))
        if kind == "application/openmetrics-text":
            if given.get("version", "").strip('"') in _OPENMETRICS_VERSIONS:
                openmetrics = max(openmetrics, quality)
        elif kind in ("text/plain", "text/*"):
            named = max(named, quality)
        elif kind == "*/*":
            anything = max(anything, quality)
    return named or anything, openmetrics


def _quality(text: str) -> float:
    try:
        quality = float(text)
    except ValueError:
        return 0.0
    return quality if 0.0 <= quality <= 1.0 else 0.0


def render(answer: MetricsAnswer, accept: str = "") -> tuple[bytes, str]:
    """(text, content type) for a client that sent this ``Accept``. OpenMetrics is for those who ask
    for it by name and like nothing better; everybody else gets the text format."""
    text, openmetrics = _qualities(accept)
    if openmetrics and openmetrics >= text:
        body: bytes = as_openmetrics(PipelineCollector(answer))  # type: ignore[no-untyped-call]
        return body, OPENMETRICS
    return as_text(PipelineCollector(answer)), TEXT
