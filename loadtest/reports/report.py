"""The table on the terminal and the JSON file."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock.loadtest.client.results import LATENCIES, percentile_name
from penstock.loadtest.roofline.device_limits import DeviceLimits

WIDTH = 44
RUN_COLUMNS = {
    "server": "server", "level": "load", "request_throughput": "req/s",
    "output_throughput": "tokens/s", "median_ttft_ms": "TTFT ms", "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT ms", "p99_tpot_ms": "p99", "median_e2el_ms": "E2EL ms",
    "failed": "failed",
}  # fmt: skip


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.2f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def rows(pairs: Sequence[tuple[str, Any]]) -> str:
    """One ``name: value`` a line, values in a column; ``None`` is left out."""
    return "\n".join(
        f"{name + ':':{WIDTH}}{_value(value):>12}" for name, value in pairs if value is not None
    )


def limits_line(result: Mapping[str, Any]) -> str:
    """The device that a floor was computed for."""
    limits: DeviceLimits | None = result["limits"]
    if limits is None:
        return "no device, no floor"
    return (
        f"{limits.device}: {limits.bandwidth / 1e9:,.4g} GB/s, {limits.flops / 1e12:,.4g} TFLOP/s "
        f"in {result['dtype']} ({limits.source})"
    )


def table(columns: Mapping[str, str], entries: Sequence[Mapping[str, Any]]) -> str:
    """A line for each entry. columns: title of each member; text stands left, numbers right with
    about four digits, and what is ``None`` is a dash."""
    shown = [[_cell(entry[name]) for name in columns] for entry in entries]
    lines = [list(columns.values()), *shown]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    left = [bool(entries) and isinstance(entries[0][name], str) for name in columns]
    return "\n".join(
        "  ".join(
            text.ljust(width) if is_left else text.rjust(width)
            for text, width, is_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    )


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if not isinstance(value, float) or value == 0:
        return f"{value:,}" if isinstance(value, int) else str(value)
    return f"{value:,.{max(0, min(6, 3 - math.floor(math.log10(abs(value)))))}f}"


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
        ("Unsent requests", result["unsent"] or None),
        ("Input tokens", result["total_input_tokens"]),
        ("Of them from the prefix cache (%)", _percent(result["prefix_hit_share"])),
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


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def level_name(result: Mapping[str, Any]) -> str:
    """How much load a run was, in a few words."""
    limit, rate = result.get("max_concurrency"), result.get("request_rate")
    if result.get("ramp_up_strategy"):
        load = f"{result['ramp_up_start_rps']:g} to {result['ramp_up_end_rps']:g} req/s"
    elif result.get("burst_size"):
        load = f"{result['burst_size']} each {result['burst_interval']:g} s"
    elif result.get("dataset_name") == "trace":
        load = f"the trace at {result.get('trace_speed', 1):g}×"
    elif rate not in (None, "inf"):
        load = f"{rate:g} req/s"
    else:
        return f"{limit} at a time" if limit else "all at once"
    return f"{load}, {limit} at a time" if limit else load


def runs_table(results: Sequence[Mapping[str, Any]]) -> str:
    """A row for each run."""
    entries = [
        {
            **{name: result.get(name) for name in RUN_COLUMNS},
            "server": str(result.get("base_url", "")),
            "level": level_name(result),
        }
        for result in results
    ]
    return table(RUN_COLUMNS, entries)


def save(result: Mapping[str, Any], path: Path) -> None:
    """Write ``result`` as JSON, one member a line. Raises ``OSError``."""
    lines = [
        b"  %s: %s" % (msgspec.json.encode(name), msgspec.json.encode(value))
        for name, value in result.items()
    ]
    path.write_bytes(b"{\n" + b",\n".join(lines) + b"\n}\n")
