"""``/metrics`` as Prometheus' own parsers read it."""

from __future__ import annotations

import pytest
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics

from penstock.protocol.process.metric_declarations import METRICS, PREFIX
from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.membership import MetricsAnswer, ProcessMetrics
from penstock.services.frontend.exposition import OPENMETRICS as OPENMETRICS_TYPE
from penstock.services.frontend.exposition import TEXT, render

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
OPENMETRICS = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;version=0.0.4;q=0.2"


def snapshot() -> MetricsAnswer:
    registry = Registry()
    registry.inc("requests_finished_total", 'sto"p', amount=3)
    registry.set("outbox_bytes", 5)
    registry.inc("process_cpu_seconds_total", amount=1.5)
    first = registry.histogram("time_to_first_token_seconds")
    first.observe_traced(0.004, "f" * 32)
    first.observe_traced(0.0045, TRACE)
    first.observe_traced(0.3, "")
    return MetricsAnswer([ProcessMetrics("frontend", 7, registry.report(), 2)])


def test_both_formats_hold_every_declared_metric_with_its_help() -> None:
    text, content_type = render(snapshot())
    assert content_type.startswith("text/plain; version=0.0.4")
    assert b"trace_id" not in text
    classic = {
        family.name: family for family in parser.text_string_to_metric_families(text.decode())
    }
    text, content_type = render(snapshot(), OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text; version=1.0.0")
    newer = {
        family.name: family for family in openmetrics.text_string_to_metric_families(text.decode())
    }
    for found in (classic, newer):
        assert {(f.name, f.type, f.documentation) for f in found.values()} == {
            (PREFIX + m.name.removesuffix("_total"), m.kind, m.help) for m in METRICS.values()
        }


def test_values_labels_and_processes_come_through() -> None:
    for accept, parse in (("", parser), (OPENMETRICS, openmetrics)):
        text = render(snapshot(), accept)[0].decode()
        values = {
            (sample.name, *sorted(sample.labels.items())): sample.value
            for family in parse.text_string_to_metric_families(text)
            for sample in family.samples
        }
        assert values["penstock_requests_finished_total", ("reason", 'sto"p')] == 3
        assert values["penstock_outbox_bytes", ("process", "frontend-2")] == 5
        assert values["penstock_process_cpu_seconds_total", ("process", "frontend-2")] == 1.5
        assert values["penstock_time_to_first_token_seconds_count",] == 3
        assert values["penstock_time_to_first_token_seconds_bucket", ("le", "0.005")] == 2


def test_a_bucket_names_the_newest_trace_that_fell_into_it() -> None:
    text = render(snapshot(), OPENMETRICS)[0].decode()
    found = {
        sample.labels["le"]: sample.exemplar
        for family in openmetrics.text_string_to_metric_families(text)
        for sample in family.samples
        if sample.exemplar
    }
    assert {bound: example.labels for bound, example in found.items()} == {
        "0.005": {"trace_id": TRACE}
    }
    assert found["0.005"].value == 0.0045


@pytest.mark.parametrize(
    ("accept", "content_type"),
    [
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html, application/json", TEXT),
        ("text/plain; version=x", TEXT),
        ("text/plain;version=1.0.0;escaping=values", TEXT),
        ("application/openmetrics-text", OPENMETRICS_TYPE),
        ("Application/OpenMetrics-Text; charset=utf-8", OPENMETRICS_TYPE),
        ("application/openmetrics-text; version=1.0.0; escaping=values", OPENMETRICS_TYPE),
        ('application/openmetrics-text; version="1.0.0"', OPENMETRICS_TYPE),
        ("application/openmetrics-text; version=abc", TEXT),
        ("application/openmetrics-text; version=1.0.0\u00e9", TEXT),
        ("application/openmetrics-text; version=0.0.1;q=0.9, */*;q=0.1", TEXT),
        ("application/openmetrics-text;q=0.3, text/plain;q=0.7", TEXT),
        ("text/plain;q=0.3, application/openmetrics-text;q=0.7", OPENMETRICS_TYPE),
        ("application/openmetrics-text;q=0, */*", TEXT),
        ("application/openmetrics-text;q=nan", TEXT),
        (OPENMETRICS, OPENMETRICS_TYPE),
    ],
)
def test_a_client_gets_the_format_that_it_likes_best_and_text_where_it_says_nothing_readable(
    accept: str, content_type: str
) -> None:
    text, found = render(snapshot(), accept)
    assert found == content_type
    assert (b"# EOF" in text) == (content_type == OPENMETRICS_TYPE)
    assert b'penstock_outbox_bytes{process="frontend-2"}' in text, "names are as declared"
