"""The table on the terminal and the JSON file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.results import LATENCIES, percentile_name

WIDTH = 44


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rows(pairs: Sequence[tuple[str, Any]]) -> str:
    """One ``name: value`` a line, values in a column; ``None`` is left out."""
    return "\n".join(
        f"{name + ':':{WIDTH}}{_value(value):>12}" for name, value in pairs if value is not None
    )


def latency_table(result: Mapping[str, Any], names: Sequence[str], shares: Sequence[float]) -> str:
    """A row for each latency, a column for each statistic; milliseconds."""
    columns = ["mean", "median", "std", *(percentile_name(share) for share in shares)]
    columns = [c for c in columns if c != "p50"]  # it is the median
    lines = [f"{'ms':{WIDTH}}" + "".join(f"{column:>10}" for column in columns)]
    for name in names:
        cells = "".join(f"{result[f'{column}_{name}_ms']:>10.2f}" for column in columns)
        lines.append(f"{LATENCIES[name]:{WIDTH}}{cells}")
    return "\n".join(lines)


def serve_table(result: Mapping[str, Any], names: Sequence[str], shares: Sequence[float]) -> str:
    """The whole report of ``bench serve``."""
    client = result["client"]
    pairs = [
        ("Successful requests", result["completed"]),
        ("Failed requests", result["failed"]),
        ("Interrupted requests", result["interrupted"] or None),
        ("Duration (s)", result["duration"]),
        ("Input tokens", result["total_input_tokens"]),
        ("Output tokens", result["total_output_tokens"]),
        ("Requests a second", result["request_throughput"]),
        ("Goodput (requests a second)", result["request_goodput"]),
        ("Output tokens a second", result["output_throughput"]),
        ("Input and output tokens a second", result["total_token_throughput"]),
        ("Output tokens in the busiest second", result["max_output_tokens_per_s"]),
        ("Most requests at the same time", result["max_concurrent_requests"]),
        ("Client's CPU (share of one core)", client["cpu_share"]),
        ("Cores of this machine", client["usable_cores"]),
    ]
    parts = [rows(pairs)]
    if result["completed"]:
        parts.append(latency_table(result, names, shares))
    for kind, found in result["error_kinds"].items():
        examples = "".join(f"\n    {example}" for example in found["examples"])
        parts.append(f"failed, {kind}: {found['count']}{examples}")
    parts.extend(f"note: {note}" for note in result["notes"])
    return "\n\n".join(parts)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write ``result`` as JSON, one member a line. Raises ``OSError``."""
    lines = [
        b"  %s: %s" % (msgspec.json.encode(name), msgspec.json.encode(value))
        for name, value in result.items()
    ]
    path.write_bytes(b"{\n" + b",\n".join(lines) + b"\n}\n")
