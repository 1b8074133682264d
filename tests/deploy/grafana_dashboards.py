"""The dashboards of deploy/grafana: their panels, declared here.

``.venv/bin/python tests/deploy/grafana_dashboards.py`` writes them anew. Every frontend tells the
figures of the whole server, so that queries take the largest over ``instance``.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

FOLDER = Path(__file__).resolve().parents[2] / "deploy/grafana"
P = "penstock_"
COLUMNS, HEIGHT, WIDTH = 2, 8, 12


class Panel(NamedTuple):
    title: str
    unit: str
    queries: dict[str, str]
    """PromQL by the legend of its series."""


def rate(metric: str, by: str = "") -> str:
    """A second's growth, by these labels."""
    labels = f" by ({by})" if by else ""
    return f"max{labels} (rate({metric}[$__rate_interval]))"


def answers() -> str:
    return f"sum by (status) ({rate(P + 'http_requests_total', 'route, status')})"


def parts() -> str:
    """Seconds of each part in a step, on average."""
    each, steps = rate(P + "step_part_seconds_total", "part"), rate(P + "steps_total")
    return f"{each} / on() group_left() {steps}"


def gauge(metric: str, by: str = "") -> str:
    return f"max{f' by ({by})' if by else ''} ({metric})"


def spread(metric: str) -> dict[str, str]:
    """Median and 99th percentile of a histogram."""
    buckets = f"max by (le) (rate({metric}_bucket[$__rate_interval]))"
    return {
        f"p{share * 100:g}": f"histogram_quantile({share}, {buckets})" for share in (0.5, 0.9, 0.99)
    }


def mean(metric: str) -> str:
    return f"{rate(metric + '_sum')} / {rate(metric + '_count')}"


DASHBOARDS: dict[str, tuple[str, tuple[Panel, ...]]] = {
    "overview": (
        "Penstock: overview",
        (
            Panel(
                "Processes that are ready",
                "short",
                {"{{service}}": gauge(P + 'processes{phase="ready"}', "service")},
            ),
            Panel(
                "Answers by status",
                "reqps",
                {"{{status}}": answers()},
            ),
            Panel("Time to first token", "s", spread(P + "time_to_first_token_seconds")),
            Panel("Time between tokens", "s", spread(P + "inter_token_latency_seconds")),
            Panel(
                "Tokens",
                "short",
                {
                    "in": rate(P + "prompt_tokens_total"),
                    "out": rate(P + "generation_tokens_total"),
                },
            ),
            Panel(
                "Sequences",
                "short",
                {
                    "running": gauge(P + "requests_running"),
                    "waiting: {{reason}}": gauge(P + "requests_waiting", "reason"),
                },
            ),
            Panel(
                "How long a new request would wait",
                "s",
                {"{{model}}": gauge(P + "estimated_wait_seconds", "model")},
            ),
            Panel(
                "Requests refused because the server is busy",
                "reqps",
                {"{{reason}}": rate(P + "requests_shed_total", "reason")},
            ),
            Panel(
                "KV memory in use, fullest engine",
                "percentunit",
                {"used": gauge(P + "kv_usage_ratio")},
            ),
            Panel(
                "Processes lost, requests continued",
                "short",
                {
                    "lost: {{service}}": rate(P + "processes_lost_total", "service"),
                    "continued by {{service}}": rate(P + "continuations_total", "service"),
                },
            ),
        ),
    ),
    "stages": (
        "Penstock: stages of a request",
        (
            Panel("From arrival to end", "s", spread(P + "e2e_request_latency_seconds")),
            Panel("Encoding (tokenizer)", "s", spread(P + "encode_seconds")),
            Panel("Queue", "s", spread(P + "request_queue_seconds")),
            Panel("Prefill", "s", spread(P + "request_prefill_seconds")),
            Panel("Decode", "s", spread(P + "request_decode_seconds")),
            Panel("Time per output token", "s", spread(P + "time_per_output_token_seconds")),
            Panel("What waits at each hop", "short", {"{{hop}}": gauge(P + "queue_depth", "hop")}),
            Panel(
                "How long it has waited",
                "s",
                {"{{hop}} {{model}}": gauge(P + "queue_age_seconds", "hop, model")},
            ),
            Panel(
                "Bytes sent by each hop", "Bps", {"{{hop}}": rate(P + "sent_bytes_total", "hop")}
            ),
            Panel(
                "CPU of each process's loop",
                "percentunit",
                {"{{process}}": rate(P + "process_loop_cpu_seconds_total", "process")},
            ),
            Panel(
                "CPU of each process",
                "short",
                {"{{process}}": rate(P + "process_cpu_seconds_total", "process")},
            ),
            Panel(
                "Memory of each process",
                "bytes",
                {"{{process}}": gauge(P + "process_resident_memory_bytes", "process")},
            ),
        ),
    ),
    "engine": (
        "Penstock: engines",
        (
            Panel("Time of a step", "s", spread(P + "step_seconds")),
            Panel(
                "Steps",
                "ops",
                {"planned": rate(P + "steps_total"), "failed": rate(P + "failed_steps_total")},
            ),
            Panel(
                "Parts of a step",
                "s",
                {"{{part}}": parts()},
            ),
            Panel(
                "In one step, on average",
                "short",
                {
                    "sequences": mean(P + "step_sequences"),
                    "tokens": mean(P + "step_tokens"),
                },
            ),
            Panel(
                "KV blocks",
                "short",
                {
                    "in all": gauge(P + "kv_blocks"),
                    "used": gauge(P + "kv_blocks_used"),
                    "cached": gauge(P + "kv_blocks_cached"),
                },
            ),
            Panel(
                "Prompt tokens found in the prefix cache",
                "percentunit",
                {
                    "found": f"{rate(P + 'prefix_cache_hit_tokens_total')} / "
                    f"{rate(P + 'prefix_cache_query_tokens_total')}"
                },
            ),
            Panel("Preemptions", "ops", {"preempted": rate(P + "preemptions_total")}),
            Panel(
                "Where requests were placed",
                "reqps",
                {"{{reason}}": rate(P + "requests_placed_total", "reason")},
            ),
        ),
    ),
    "keys": (
        "Penstock: keys and models",
        (
            Panel("Requests by key", "reqps", {"{{key}}": rate(P + "key_requests_total", "key")}),
            Panel(
                "Tokens by key",
                "short",
                {"{{key}} {{kind}}": rate(P + "key_tokens_total", "key, kind")},
            ),
            Panel(
                "Tokens by model",
                "short",
                {"{{model}} {{kind}}": rate(P + "usage_tokens_total", "model, kind")},
            ),
            Panel(
                "Refused by a limit of a key",
                "reqps",
                {"{{limit}}": rate(P + "requests_limited_total", "limit")},
            ),
            Panel("Prompt tokens of a request", "short", spread(P + "request_prompt_tokens")),
            Panel(
                "Generated tokens of a request", "short", spread(P + "request_generation_tokens")
            ),
            Panel(
                "Ends of choices",
                "reqps",
                {"{{reason}}": rate(P + "requests_finished_total", "reason")},
            ),
        ),
    ),
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
        "options": {"legend": {"displayMode": "list", "placement": "bottom"}},
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


def metrics_of(query: str) -> set[str]:
    """The series that a query asks for."""
    return set(re.findall(rf"\b{P}\w+", query))


if __name__ == "__main__":
    for one in DASHBOARDS:
        (FOLDER / f"{one}.json").write_text(dashboard(one))
