"""``/metrics``: what all processes have counted, in Prometheus' text format or OpenMetrics.

OpenMetrics has exemplars: of buckets of latencies, the id of a trace that fell into each.
"""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar as FamilyExemplar

from penstock.protocol.process.metric_declarations import METRICS, PREFIX, Metric
from penstock.protocol.process.metrics import Totals, collect
from penstock.protocol.wire.messages.membership import MetricsAnswer


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


def render(answer: MetricsAnswer, accept: str = "") -> tuple[bytes, str]:
    """(text, content type) for a client that sent this ``Accept``."""
    encode, content_type = choose_encoder(accept)
    return encode(PipelineCollector(answer)), content_type
