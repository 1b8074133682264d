"""The dashboards as Grafana's own types read them, and as a running server's metrics are named."""

from __future__ import annotations

import json
import re
import urllib.request
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.deploy import grafana_dashboards
from support.pipeline.served import NULL, SharedServers
from test_monitoring import QUERIES

UNITS = {"short", "s", "reqps", "ops", "percentunit", "Bps", "bytes"}
"""Grafana's names of units, as far as panels here use them
(https://github.com/grafana/grafana/blob/main/packages/grafana-data/src/valueFormats/categories.ts)."""
OF_PROMETHEUS = {"le", "instance", "job"}
ASKED = re.compile(r"(?:by \(([^)]*)\) )?\((?:rate\(|increase\()?(penstock_\w+)(\{[^}]*\})?")
"""What a series is grouped by, the series, and what is chosen of it."""


def dashboard(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((grafana_dashboards.FOLDER / f"{name}.json").read_text())
    return found


def unread(written: Any, read: Any, path: str = "") -> list[str]:
    """Where what was written is not in what was read."""
    if isinstance(written, dict) and isinstance(read, dict):
        return [
            fault
            for name, value in written.items()
            for fault in (
                unread(value, read[name], f"{path}/{name}") if name in read else [f"{path}/{name}"]
            )
        ]
    if isinstance(written, list) and isinstance(read, list) and len(written) == len(read):
        pairs = enumerate(zip(written, read, strict=True))
        return [fault for at, both in pairs for fault in unread(*both, f"{path}/{at}")]
    return [] if written == read else [path]


def as_grafana_reads(written: dict[str, Any]) -> Any:
    pytest.importorskip("grafana_foundation_sdk", reason="make setup installs Grafana's types")
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.cog.plugins import register_default_plugins
    from grafana_foundation_sdk.models.dashboard import Dashboard

    register_default_plugins()  # else panels and queries are kept as they are, and nothing is read
    return json.loads(JSONEncoder().encode(Dashboard.from_json(written)))


@pytest.mark.parametrize("name", grafana_dashboards.DASHBOARDS)
def test_grafanas_types_know_every_field(name: str) -> None:
    written = dashboard(name)
    assert unread(written, as_grafana_reads(written)) == []


def test_a_field_that_grafana_does_not_know_is_seen() -> None:
    written = dashboard("overview")
    written["panels"][0]["options"]["legend"]["shown"] = True
    written["panels"][0]["targets"][0]["query"] = "up"
    written["titel"] = "Overview"
    assert set(unread(written, as_grafana_reads(written))) == {
        "/titel",
        "/panels/0/options/legend/shown",
        "/panels/0/targets/0/query",
    }


@pytest.mark.parametrize("name", grafana_dashboards.DASHBOARDS)
def test_panels_have_places_of_their_own_names_and_units_of_grafana(name: str) -> None:
    panels = dashboard(name)["panels"]
    assert len({panel["id"] for panel in panels}) == len({p["title"] for p in panels})
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"] in UNITS
        references = [target["refId"] for target in panel["targets"]]
        assert len(set(references)) == len(references)
        for target in panel["targets"]:
            grouped = re.findall(r" by \(([^)]*)\)", target["expr"])
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert shown <= {one for names in grouped for one in names.split(", ")}


def test_a_running_server_exposes_each_metric_with_the_labels_that_queries_use(
    shared_server: SharedServers,
) -> None:
    server = shared_server(*NULL)
    status, _ = server.post("/v1/completions", {"prompt": "one two three", "max_tokens": 4})
    assert status == 200
    server.settled()
    names: set[str] = set()
    labels: dict[str, set[str]] = {}
    with urllib.request.urlopen(server.url + "/metrics", timeout=60) as answer:
        text = answer.read().decode()
    for family in text_string_to_metric_families(text):
        parts = {"histogram": ("_bucket", "_sum", "_count"), "counter": ("_total",)}
        names |= {family.name + part for part in parts.get(family.type, ("",))}
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    told = 0
    for name, query in QUERIES.items():
        found = ASKED.findall(query)
        assert found or name == "PenstockDown", query
        for grouped, metric, chosen in found:
            assert metric in names, name
            used = {*grouped.split(", "), *re.findall(r"(\w+)(?:=|!=|=~|!~)", chosen)}
            told += metric in labels
            assert used - {""} <= labels.get(metric, used) | OF_PROMETHEUS, name
    assert told > len(QUERIES) / 2  # what never happened has no series with labels
