"""The dashboards of deploy/grafana: their panels, declared here.

``.venv/bin/python tests/support/deploy/grafana_dashboards.py`` writes them anew. Every frontend
tells the figures of the whole server, so that queries take the largest over ``instance``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[3] / "deploy/grafana"
P = "penstock_"
COLUMNS, HEIGHT, WIDTH = 2, 8, 12


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]
    """PromQL by the legend of its series."""


def rate(metric: str, by: str = "") -> str:
    """A second's growth of a metric, by these labels."""
    return _largest(f"rate({P}{metric}[$__rate_interval])", by)


def gauge(metric: str, by: str = "") -> str:
    return _largest(P + metric, by)


def _largest(series: str, by: str) -> str:
    return f"max by ({by}) ({series})" if by else f"max ({series})"


def mean(histogram: str) -> str:
    return f"{rate(histogram + '_sum')} / {rate(histogram + '_count')}"


def by_labels(title: str, unit: str, query: str) -> Panel:
    """A panel of one query: its series are named by the labels that it is grouped by."""
    labels = re.findall(r" by \((.*?)\) ", query)[0].split(", ")
    return Panel(title, unit, {" ".join(f"{{{{{label}}}}}" for label in labels): query})


def spread(title: str, histogram: str, unit: str = "s") -> Panel:
    """A panel with the median, the 90th and the 99th percentile of a histogram."""
    buckets = rate(histogram + "_bucket", "le")
    shares = (0.5, 0.9, 0.99)
    queries = {f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in shares}
    return Panel(title, unit, queries)


OVERVIEW = (
    by_labels("Processes that are ready", "short", gauge('processes{phase="ready"}', "service")),
    by_labels(
        "Answers by status",
        "reqps",
        f"sum by (status) ({rate('http_requests_total', 'route, status')})",
    ),
    spread("Time to first token", "time_to_first_token_seconds"),
    spread("Time between tokens", "inter_token_latency_seconds"),
    Panel(
        "Tokens",
        "short",
        {"in": rate("prompt_tokens_total"), "out": rate("generation_tokens_total")},
    ),
    Panel(
        "Sequences",
        "short",
        {
            "running": gauge("requests_running"),
            "waiting: {{reason}}": gauge("requests_waiting", "reason"),
        },
    ),
    by_labels("How long a new request would wait", "s", gauge("estimated_wait_seconds", "model")),
    by_labels(
        "Requests refused because the server is busy",
        "reqps",
        rate("requests_shed_total", "reason"),
    ),
    Panel("KV memory in use, fullest engine", "percentunit", {"used": gauge("kv_usage_ratio")}),
    Panel(
        "Processes lost, requests continued",
        "short",
        {
            "lost: {{service}}": rate("processes_lost_total", "service"),
            "continued by {{service}}": rate("continuations_total", "service"),
        },
    ),
)
STAGES = (
    spread("From arrival to end", "e2e_request_latency_seconds"),
    spread("Encoding (tokenizer)", "encode_seconds"),
    spread("Queue", "request_queue_seconds"),
    spread("Prefill", "request_prefill_seconds"),
    spread("Decode", "request_decode_seconds"),
    spread("Time per output token", "time_per_output_token_seconds"),
    by_labels("What waits at each hop", "short", gauge("queue_depth", "hop")),
    by_labels("How long it has waited", "s", gauge("queue_age_seconds", "hop, model")),
    by_labels("Bytes sent by each hop", "Bps", rate("sent_bytes_total", "hop")),
    by_labels(
        "CPU of each process's loop",
        "percentunit",
        rate("process_loop_cpu_seconds_total", "process"),
    ),
    by_labels("CPU of each process", "short", rate("process_cpu_seconds_total", "process")),
    by_labels("Memory of each process", "bytes", gauge("process_resident_memory_bytes", "process")),
)
ENGINE = (
    spread("Time of a step", "step_seconds"),
    Panel("Steps", "ops", {"planned": rate("steps_total"), "failed": rate("failed_steps_total")}),
    by_labels(
        "Parts of a step",
        "s",
        f"{rate('step_part_seconds_total', 'part')} / on() group_left() {rate('steps_total')}",
    ),
    Panel(
        "In one step, on average",
        "short",
        {"sequences": mean("step_sequences"), "tokens": mean("step_tokens")},
    ),
    Panel(
        "KV blocks",
        "short",
        {
            "in all": gauge("kv_blocks"),
            "used": gauge("kv_blocks_used"),
            "cached": gauge("kv_blocks_cached"),
        },
    ),
    Panel(
        "Prompt tokens found in the prefix cache",
        "percentunit",
        {
            "found": f"{rate('prefix_cache_hit_tokens_total')} / "
            f"{rate('prefix_cache_query_tokens_total')}"
        },
    ),
    Panel("Preemptions", "ops", {"preempted": rate("preemptions_total")}),
    by_labels("Where requests were placed", "reqps", rate("requests_placed_total", "reason")),
)
KEYS = (
    by_labels("Requests by key", "reqps", rate("key_requests_total", "key")),
    by_labels("Tokens by key", "short", rate("key_tokens_total", "key, kind")),
    by_labels("Tokens by model", "short", rate("usage_tokens_total", "model, kind")),
    by_labels("Refused by a limit of a key", "reqps", rate("requests_limited_total", "limit")),
    spread("Prompt tokens of a request", "request_prompt_tokens", "short"),
    spread("Generated tokens of a request", "request_generation_tokens", "short"),
    by_labels("Ends of choices", "reqps", rate("requests_finished_total", "reason")),
)
DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": ("Penstock: overview", OVERVIEW),
    "stages": ("Penstock: stages of a request", STAGES),
    "engine": ("Penstock: engines", ENGINE),
    "keys": ("Penstock: keys and models", KEYS),
}


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    source = {"type": "prometheus", "uid": "${source}"}
    row, column = divmod(number, COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "datasource": source,
        "gridPos": {"h": HEIGHT, "w": WIDTH, "x": column * WIDTH, "y": row * HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {
                "refId": chr(ord("A") + place),
                "datasource": source,
                "expr": query,
                "legendFormat": legend,
                "exemplar": "_bucket" in query,
            }
            for place, (legend, query) in enumerate(panel.queries.items())
        ],
    }


def dashboard(name: str) -> str:
    """The JSON that Grafana imports."""
    title, panels = DASHBOARDS[name]
    found = {
        "uid": f"penstock-{name}",
        "title": title,
        "tags": ["penstock"],
        "schemaVersion": 39,
        "editable": True,
        "refresh": "30s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {
            "list": [
                {
                    "name": "source",
                    "label": "Prometheus",
                    "type": "datasource",
                    "query": "prometheus",
                }
            ]
        },
        "panels": [_panel(number, panel) for number, panel in enumerate(panels)],
    }
    return json.dumps(found, indent=2) + "\n"


if __name__ == "__main__":
    for one in DASHBOARDS:
        (FOLDER / f"{one}.json").write_text(dashboard(one))
