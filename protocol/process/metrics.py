"""Counting what ``metric_declarations.py`` declares, and merging what processes have counted.

A process keeps one ``Registry`` and puts ``registry.report()`` (absolute values) into its beats.
The router keeps the newest report of each process and the total of the dead (``merge``); every
frontend shows the same snapshot (``collect``), so ``/metrics`` does not depend on which frontend
answers.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_left
from collections.abc import Iterable

import msgspec

from penstock.protocol.process.metric_declarations import METRICS, Kind, Metric
from penstock.protocol.wire.messages.membership import (
    Exemplar,
    MetricSample,
    MetricsAnswer,
    MetricsReport,
)

MAX_SERIES = 512
"""Label combinations kept of one metric; of further ones the unbounded label, or each where none
is declared to be, counts as ``OTHER``."""
OTHER = "other"


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

    __slots__ = ("_above", "_bucket", "_limits", "_most", "bounds", "counts", "exemplars", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0
        self.exemplars: dict[int, Exemplar] = {}
        """The newest traced observation of each bucket."""
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

    def observe_traced(self, value: float, trace_id: str) -> None:
        """Count ``value`` once; where it belongs to a trace, it becomes its bucket's example."""
        self.observe(value)
        if trace_id:
            self.exemplars[self._bucket] = Exemplar(self._bucket, trace_id, value, time.time())


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
        if found is not None:
            return found
        metric = METRICS.get(name)
        if metric is None or metric.kind != kind or len(labels) != len(metric.labels):
            raise ValueError(f"{name}{labels} is not a declared {kind}; see METRICS")
        size = self._sizes.get(name, 0)
        if size >= MAX_SERIES:
            named = zip(metric.labels, labels, strict=True)
            labels = tuple(
                value if metric.unbounded not in ("", name) else OTHER for name, value in named
            )
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

    def remove(self, name: str, *labels: str) -> None:
        """Forget a series, as that of a model that is no longer there. Unknown ones are ignored."""
        if self._series.pop((name, labels), None) is not None:
            self._sizes[name] -= 1

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
                examples = list(series.exemplars.values())
                samples.append(MetricSample(name, list(labels), values, examples))
            else:
                samples.append(MetricSample(name, list(labels), [float(series.value)]))
        return MetricsReport(samples)


def _num_values(metric: Metric) -> int:
    return len(metric.buckets) + 2 if metric.kind == "histogram" else 1


def _usable(sample: MetricSample) -> Metric | None:
    """The declaration of a sample, or None where the sample does not fit it."""
    metric = METRICS.get(sample.name)
    if metric is None or len(sample.labels) != len(metric.labels):
        return None
    return metric if len(sample.values) == _num_values(metric) else None


class Totals(msgspec.Struct, gc=False):
    """One series over several processes."""

    values: list[float]
    """As in ``MetricSample``."""
    exemplars: dict[int, Exemplar]
    """By bucket, the newest of each."""


Key = tuple[str, tuple[str, ...]]
"""A metric's name and the values of its labels."""


def _add(table: dict[Key, Totals], key: Key, sample: MetricSample) -> None:
    so_far = table.get(key)
    if so_far is None:
        so_far = table[key] = Totals(list(sample.values), {})
    elif METRICS[key[0]].largest:
        so_far.values = list(map(max, so_far.values, sample.values))
    else:
        so_far.values = [a + b for a, b in zip(so_far.values, sample.values, strict=True)]
    for one in sample.exemplars:
        known = so_far.exemplars.get(one.bucket)
        if known is None or known.at < one.at:
            so_far.exemplars[one.bucket] = one


def merge(reports: Iterable[MetricsReport]) -> MetricsReport:
    """One report in place of many: series with the same name and labels are summed, and of gauges
    declared ``largest`` the largest is taken.

    Samples that do not fit their declaration are left out, and so are metrics declared
    ``by_process``, whose sum says nothing. For the total of dead processes see also ``collect``,
    which ignores their gauges.
    """
    table: dict[Key, Totals] = {}
    for report in reports:
        for sample in report.samples:
            metric = _usable(sample)
            if metric is not None and not metric.by_process:
                _add(table, (sample.name, tuple(sample.labels)), sample)
    return MetricsReport(
        [
            MetricSample(name, list(labels), total.values, list(total.exemplars.values()))
            for (name, labels), total in table.items()
        ]
    )


def collect(answer: MetricsAnswer) -> dict[str, dict[tuple[str, ...], Totals]]:
    """Every declared metric: its series by label values, over all processes.

    Counters and histograms are summed over processes, living and dead; gauges over the living, of
    which only the largest counts where the metric says so. A metric ``by_process`` has the process
    as its last label. One without labels that nobody reported yet is zero.
    """
    table: dict[Key, Totals] = {}
    for process in answer.processes:
        for sample in process.report.samples:
            metric = _usable(sample)
            if metric is None or (metric.kind == "gauge" and process.incarnation == 0):
                continue  # a dead process holds nothing any more
            labels = tuple(sample.labels)
            if metric.by_process:
                labels = (*labels, f"{process.service}-{process.number}")
            _add(table, (sample.name, labels), sample)
    found: dict[str, dict[tuple[str, ...], Totals]] = {name: {} for name in METRICS}
    for (name, labels), total in table.items():
        found[name][labels] = total
    for metric in METRICS.values():
        if not found[metric.name] and not metric.labels and not metric.by_process:
            found[metric.name][()] = Totals([0.0] * _num_values(metric), {})
    return found
