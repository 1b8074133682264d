"""Metrics: counting, merging over processes, and the text that Prometheus reads."""

from __future__ import annotations

import itertools
import math
import operator
import random
import re
import threading

import pytest

from penstock.protocol.process.metric_declarations import METRICS
from penstock.protocol.process.metrics import MAX_SERIES, Registry, merge
from penstock.protocol.wire.messages.membership import (
    MetricSample,
    MetricsAnswer,
    MetricsReport,
    ProcessMetrics,
)
from penstock.services.frontend import exposition

LINE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(\{(.*)\})? (\S+)$")
LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"(?:,|$)')

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]


def parse(text: bytes) -> tuple[Samples, dict[str, str]]:
    """A strict reader of the exposition format: (samples, type of each metric)."""
    samples: Samples = {}
    types: dict[str, str] = {}
    assert text.endswith(b"\n")
    for line in text.decode().splitlines():
        if line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            assert name not in types
            types[name] = kind
            continue
        if line.startswith("# HELP "):
            continue
        match = LINE.match(line)
        assert match, line
        labels = LABEL.findall(match[3] or "")
        if match[3]:
            assert "".join(f'{n}="{v}",' for n, v in labels).rstrip(",") == match[3], line
        key = (match[1], tuple(labels))
        assert key not in samples, f"twice: {line}"
        samples[key] = float(match[4])
    return samples, types


def render(answer: MetricsAnswer) -> bytes:
    return exposition.render(answer)[0]


def answer(*registries: Registry, incarnations: tuple[int, ...] = ()) -> MetricsAnswer:
    numbers = incarnations or tuple(range(1, len(registries) + 1))
    return MetricsAnswer(
        [
            ProcessMetrics("frontend", number, registry.report(), place)
            for place, (number, registry) in enumerate(zip(numbers, registries, strict=True))
        ]
    )


def test_counters_and_gauges_of_all_processes_are_summed() -> None:
    one, two = Registry(), Registry()
    one.inc("requests_finished_total", "stop", amount=3)
    two.inc("requests_finished_total", "stop")
    two.inc("requests_finished_total", "length")
    one.set("queue_depth", 5, "router")
    two.set("queue_depth", 2, "router")
    samples, types = parse(render(answer(one, two)))
    assert samples["penstock_requests_finished_total", (("reason", "stop"),)] == 4
    assert samples["penstock_requests_finished_total", (("reason", "length"),)] == 1
    assert samples["penstock_queue_depth", (("hop", "router"),)] == 7
    assert types["penstock_requests_finished_total"] == "counter"
    assert types["penstock_queue_depth"] == "gauge"


def test_a_histogram_is_cumulative_and_a_value_on_a_bound_belongs_to_that_bucket() -> None:
    registry = Registry()
    for value in (0.0005, 0.0006, 0.004, 99.0):
        registry.observe("inter_token_latency_seconds", value)
    registry.histogram("inter_token_latency_seconds").observe(0.002, 10)
    samples, types = parse(render(answer(registry)))
    name = "penstock_inter_token_latency_seconds"

    def bucket(bound: str) -> float:
        return samples[f"{name}_bucket", (("le", bound),)]

    assert types[name] == "histogram"
    assert bucket("0.0005") == 1
    assert bucket("0.001") == 2
    assert bucket("0.002") == 12
    assert bucket("0.004") == 13
    assert bucket("5.0") == 13
    assert bucket("+Inf") == 14 == samples[f"{name}_count", ()]
    assert samples[f"{name}_sum", ()] == pytest.approx(0.0005 + 0.0006 + 0.004 + 99 + 0.02)


def test_each_value_is_counted_in_its_bucket_whatever_came_before_it() -> None:
    registry = Registry()
    histogram = registry.histogram("inter_token_latency_seconds")
    bounds = (*histogram.bounds, math.inf)
    around = [bound * part for bound in histogram.bounds for part in (0.9, 1.0, 1.1)]
    values = random.Random(1).choices([0.0, -1.0, *around, math.inf], k=2000)
    for value in values:
        histogram.observe(value)
    assert histogram.counts == [
        sum(low < value <= high for value in values)
        for low, high in itertools.pairwise((-math.inf, *bounds))
    ]


def test_histograms_of_two_processes_are_summed_bucket_by_bucket() -> None:
    one, two = Registry(), Registry()
    one.observe("step_seconds", 0.00015)
    two.observe("step_seconds", 0.00015)
    two.observe("step_seconds", 1000.0)
    samples, _ = parse(render(answer(one, two)))
    assert samples["penstock_step_seconds_bucket", (("le", "0.0002"),)] == 2
    assert samples["penstock_step_seconds_bucket", (("le", "30.0"),)] == 2
    assert samples["penstock_step_seconds_count", ()] == 3


def test_the_dead_keep_their_counters_and_lose_their_gauges() -> None:
    dead, alive = Registry(), Registry()
    for registry in (dead, alive):
        registry.inc("preemptions_total", amount=2)
        registry.set("requests_running", 7)
    samples, _ = parse(render(answer(dead, alive, incarnations=(0, 9))))
    assert samples["penstock_preemptions_total", ()] == 4
    assert samples["penstock_requests_running", ()] == 7


def test_a_gauge_by_process_names_its_process() -> None:
    one, two = Registry(), Registry()
    one.set("outbox_bytes", 10)
    two.set("outbox_bytes", 20)
    samples, _ = parse(render(answer(one, two, incarnations=(10, 11))))
    assert samples["penstock_outbox_bytes", (("process", "frontend-0"),)] == 10
    assert samples["penstock_outbox_bytes", (("process", "frontend-1"),)] == 20


def test_of_ages_the_largest_of_all_living_processes_is_told() -> None:
    young, old, dead = Registry(), Registry(), Registry()
    young.set("queue_age_seconds", 0.25, "tokenizer", "llama")
    old.set("queue_age_seconds", 1.5, "tokenizer", "llama")
    young.set("queue_age_seconds", 9.0, "tokenizer", "qwen")
    dead.set("queue_age_seconds", 60.0, "tokenizer", "llama")
    samples, types = parse(render(answer(old, young, dead, incarnations=(10, 11, 0))))
    key = "penstock_queue_age_seconds", (("hop", "tokenizer"), ("model", "llama"))
    assert samples[key] == 1.5
    assert types[key[0]] == "gauge"
    merged = MetricsAnswer([ProcessMetrics("tokenizer", 10, merge([young.report(), old.report()]))])
    assert parse(render(merged))[0][key] == 1.5


def test_merged_reports_render_as_the_single_ones_do() -> None:
    one, two = Registry(), Registry()
    for registry, amount in ((one, 1.0), (two, 41.0)):
        registry.inc("steps_total", amount=amount)
        registry.observe("step_seconds", amount)
        registry.inc("http_requests_total", "/live", "200", amount=amount)
    merged = merge([one.report(), two.report()])
    together = MetricsAnswer([ProcessMetrics("worker", 0, merged)])
    assert parse(render(together)) == parse(render(answer(one, two)))


def test_what_nobody_reported_is_zero_and_every_metric_is_described() -> None:
    samples, types = parse(render(MetricsAnswer([])))
    assert samples["penstock_requests_running", ()] == 0
    assert samples["penstock_step_seconds_count", ()] == 0
    assert set(types) == {f"penstock_{name}" for name in METRICS}


def test_label_values_are_escaped() -> None:
    registry = Registry()
    registry.inc("dropped_messages_total", 'a"b\\c\nd')
    text = render(answer(registry))
    assert rb'{reason="a\"b\\c\nd"} 1.0' in text
    parse(text)


def test_samples_that_do_not_fit_their_declaration_are_ignored() -> None:
    bad = MetricsReport(
        [
            MetricSample("no_such_metric", [], [1.0]),
            MetricSample("steps_total", ["surplus"], [1.0]),
            MetricSample("step_seconds", [], [1.0]),
            MetricSample("steps_total", [], []),
        ]
    )
    text = render(MetricsAnswer([ProcessMetrics("worker", 1, bad)]))
    assert parse(text) == parse(render(MetricsAnswer([])))
    assert merge([bad]).samples == []


def test_label_combinations_are_bounded() -> None:
    registry = Registry()
    for number in range(MAX_SERIES + 100):
        registry.inc("dropped_messages_total", f"reason {number}")
    samples = registry.report().samples
    assert len(samples) == MAX_SERIES + 1
    other = [s for s in samples if s.labels == ["other"]]
    assert [s.values for s in other] == [[100.0]]


def test_beyond_the_bound_only_what_the_operator_names_is_replaced() -> None:
    registry = Registry()
    for number in range(MAX_SERIES):
        for kind in ("prompt", "completion"):
            registry.inc("key_tokens_total", f"key {number}", kind)
    samples = {tuple(one.labels): one.values for one in registry.report().samples}
    half = MAX_SERIES / 2
    assert samples["other", "prompt"] == samples["other", "completion"] == [half]
    assert len(samples) == MAX_SERIES + 2


def test_a_removed_series_is_told_no_more_and_leaves_its_place_to_others() -> None:
    registry = Registry()
    registry.set("estimated_wait_seconds", 3.0, "a")
    registry.remove("estimated_wait_seconds", "a")
    registry.remove("estimated_wait_seconds", "never there")
    assert registry.report().samples == []
    for number in range(MAX_SERIES):
        registry.set("estimated_wait_seconds", 1.0, str(number))
    assert len(registry.report().samples) == MAX_SERIES
    assert ["other"] not in [one.labels for one in registry.report().samples]


def test_undeclared_names_wrong_kinds_and_wrong_labels_are_refused() -> None:
    registry = Registry()
    with pytest.raises(ValueError, match="no_such"):
        registry.inc("no_such")
    with pytest.raises(ValueError, match="gauge"):
        registry.set("steps_total", 1.0)
    with pytest.raises(ValueError, match="queue_depth"):
        registry.set("queue_depth", 1.0)


def test_a_report_can_be_made_while_another_thread_counts() -> None:
    """Each value is whole, none goes back, and what is new meanwhile breaks no report."""
    registry = Registry()
    began, stop = threading.Event(), threading.Event()
    counter = registry.counter("steps_total")
    histogram = registry.histogram("step_seconds")

    def count() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            registry.inc("dropped_messages_total", str(number % 400))
            histogram.observe(0.001 * (number % 100))
            counter.inc()
            began.set()

    thread = threading.Thread(target=count)
    thread.start()
    try:
        assert began.wait(60)
        newest: dict[tuple[str, ...], list[float]] = {}
        for _ in range(200):
            for sample in registry.report().samples:
                key = (sample.name, *sample.labels)
                before = newest.get(key, [0.0] * len(sample.values))
                assert all(map(operator.le, before, sample.values)), key
                newest[key] = sample.values
    finally:
        stop.set()
        thread.join()
    totals = {(s.name, *s.labels): s.values for s in registry.report().samples}
    assert totals["steps_total",] == [counter.value]
    assert sum(totals["step_seconds",][:-1]) == counter.value
    dropped = sum(v[0] for (name, *_), v in totals.items() if name == "dropped_messages_total")
    assert dropped == counter.value > 0


def test_every_declaration_is_sound() -> None:
    for metric in METRICS.values():
        assert metric.help.endswith(".")
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert bool(metric.buckets) == (metric.kind == "histogram")
        assert metric.kind == "gauge" or not metric.largest
        assert metric.kind != "histogram" or not metric.by_process
        assert metric.unbounded in ("", *metric.labels)
        assert metric.name.endswith("_total") == (metric.kind == "counter")
