"""Alerts and dashboards: they ask for metrics that there are, and alerts fire when they should."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from support.deploy import grafana_dashboards

from penstock.protocol.process.metric_declarations import METRICS, PREFIX

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "deploy/prometheus/penstock.rules.yml"
ALERTS = [one for group in yaml.safe_load(RULES.read_text())["groups"] for one in group["rules"]]
QUERIES = {
    **{alert["alert"]: alert["expr"] for alert in ALERTS},
    **{
        f"{name}: {panel.title} {legend}": query
        for name, (_, panels) in grafana_dashboards.DASHBOARDS.items()
        for panel in panels
        for legend, query in panel.queries.items()
    },
}


def wrong_names(query: str) -> set[str]:
    """What a query asks for that no metric is, or no series or label of one."""
    wrong = set()
    for name, selector in re.findall(rf"\b({PREFIX}\w+)(\{{[^}}]*\}})?", query):
        base = re.sub("_(bucket|sum|count)$", "", name).removeprefix(PREFIX)
        metric = METRICS.get(base)
        if metric is None or (metric.kind == "histogram") != (name != PREFIX + base):
            wrong.add(name)
            continue
        labels = {*metric.labels, *(["process"] if metric.by_process else [])}
        wrong |= set(re.findall(r"(\w+)(?:=|!=|=~|!~)", selector)) - labels - {"le"}
    return wrong


@pytest.mark.parametrize("name", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_are_declared(name: str) -> None:
    assert wrong_names(QUERIES[name]) == set()


def test_a_name_that_is_not_declared_is_seen() -> None:
    assert wrong_names("rate(penstock_no_such_total[5m])") == {"penstock_no_such_total"}
    assert wrong_names("penstock_step_seconds") == {"penstock_step_seconds"}
    assert wrong_names('penstock_queue_depth{pop="x"}') == {"pop"}


@pytest.mark.parametrize("name", grafana_dashboards.DASHBOARDS)
def test_the_dashboards_are_those_that_are_declared(name: str) -> None:
    kept = (grafana_dashboards.FOLDER / f"{name}.json").read_text()
    assert kept == grafana_dashboards.dashboard(name), (
        "run .venv/bin/python tests/support/deploy/grafana_dashboards.py"
    )


def test_the_runbook_has_a_line_on_each_alert() -> None:
    runbook = (ROOT / "docs/operations.md").read_text()
    assert re.findall(r"^\| `(Penstock\w+)` \|", runbook, re.M) == [one["alert"] for one in ALERTS]


@pytest.mark.skipif(
    shutil.which("promtool") is None, reason="no promtool: apt-get install prometheus"
)
def test_alerts_fire_when_they_should_and_not_else() -> None:
    for asked in (
        ("check", "config", "deploy/prometheus/prometheus.yml"),
        ("test", "rules", "tests/deploy/penstock.rules.test.yml"),
    ):
        done = subprocess.run(["promtool", *asked], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
