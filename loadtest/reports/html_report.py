"""The report of load tests: one HTML file with tables and inline SVG, and nothing from elsewhere.

Its figures are those of the result files; each cell of a table has the unrounded value in
``data-value``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import penstock
from penstock.loadtest.reports.report import level_name
from penstock.loadtest.reports.report_style import STYLE
from penstock.loadtest.reports.result_files import Run, Series
from penstock.loadtest.reports.svg_plot import Line, plot, shown

COLUMNS = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT, ms",
    "p99_ttft_ms": "p99",
    "median_tpot_ms": "TPOT, ms",
    "p99_tpot_ms": "p99",
    "median_itl_ms": "ITL, ms",
    "p99_itl_ms": "p99",
    "median_e2el_ms": "E2EL, ms",
    "p99_e2el_ms": "p99",
    "request_goodput": "goodput, requests/s",
    "prefix_hit_share": "prefix hits",
    "max_concurrent_requests": "most open",
    "completed": "completed",
    "failed": "failed",
}
"""Of the table of all runs; a column that no run has is left out."""
COMPARED = {
    "request_throughput": "requests/s",
    "output_throughput": "output tokens/s",
    "median_ttft_ms": "TTFT",
    "p99_ttft_ms": "TTFT p99",
    "median_tpot_ms": "TPOT",
    "median_e2el_ms": "E2EL",
}
AGAINST = {
    "ttft": "Time to first token",
    "tpot": "Time per output token",
    "e2el": "End-to-end latency",
}
SETTINGS = (
    "date", "model_id", "base_url", "endpoint", "dataset_name", "num_prompts", "num_sessions",
    "request_rate", "burstiness", "max_concurrency", "ramp_up_strategy", "ramp_up_start_rps",
    "ramp_up_end_rps", "burst_size", "burst_interval", "trace_speed", "latency_from", "seed",
    "duration", "total_input_tokens", "total_output_tokens",
)  # fmt: skip
_DATE = re.compile(r"^(\d{4})(\d\d)(\d\d)-(\d\d)(\d\d)(\d\d)$")


def html_report(series: Sequence[Series], title: str) -> str:
    """The whole page."""
    several = len(series) > 1
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(_about(series))}</p>',
        "<h2>All runs</h2>",
        _runs_table(series),
    ]
    if any(len(one.runs) > 1 for one in series) or several:
        parts += ["<h2>Throughput against latency</h2>", '<div class="plots">']
        parts += [_against(series, name, what) for name, what in AGAINST.items()]
        parts.append("</div>")
    if several and (compared := _comparison(series)):
        parts += ["<h2>Comparison</h2>", compared]
    parts.append("<h2>Over time</h2>")
    number = 0
    for one in series:
        for run in one.runs:
            parts.append(_run(one, run, is_open=number == 0))
            number += 1
    parts.append(f'<p class="about">Made by penstock {penstock.__version__}.</p>')
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n"
        f"<body><main>\n{chr(10).join(parts)}\n</main></body></html>\n"
    )


def _date(text: str) -> str:
    """``2026-11-26 12:00:00`` of ``20261126-120000``; others as they are."""
    return _DATE.sub(r"\1-\2-\3 \4:\5:\6", text)


def _about(series: Sequence[Series]) -> str:
    runs = [run for one in series for run in one.runs]
    models = dict.fromkeys(str(run["model_id"]) for run in runs if run.get("model_id"))
    dates = [_date(one) for one in sorted(str(run["date"]) for run in runs if run.get("date"))]
    said = [", ".join(models), f"{len(runs)} run{'s' if len(runs) > 1 else ''}"]
    if dates:
        said.append(dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}")
    said.append(
        "milliseconds; TTFT and E2EL count from when a request was to be sent"
        if all(run.get("latency_from") == "intended" for run in runs)
        else "milliseconds"
    )
    return " · ".join(filter(None, said))


def _cell(value: Any) -> str:
    if value is None:
        return "<td>–</td>"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return f'<td class="text">{escape(str(value))}</td>'
    return f'<td data-value="{value!r}">{shown(value)}</td>'


def _table(heads: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    are_text = [isinstance(value, str) for value in rows[0]] if rows else [False] * len(heads)
    head = "".join(
        f"<th{' class=text' if is_text else ''}>{escape(name)}</th>"
        for name, is_text in zip(heads, are_text, strict=True)
    )
    body = "".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return (
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody>'
        "</table></div>"
    )


def _runs_table(series: Sequence[Series]) -> str:
    runs = [run for one in series for run in one.runs]
    columns = {name: head for name, head in COLUMNS.items() if any(_has(r, name) for r in runs)}
    rows = [
        [one.label, level_name(run), *(run.get(name) for name in columns)]
        for one in series
        for run in one.runs
    ]
    return _table(["server", "load", *columns.values()], rows)


def _has(run: Run, name: str) -> bool:
    return run.get(name) is not None


def _against(series: Sequence[Series], name: str, what: str) -> str:
    """Output tokens a second across, a latency up: the median, and dashed the 99th percentile."""
    lines = []
    for number, one in enumerate(series):
        for statistic, dashed in (("median", False), ("p99", True)):
            runs = [run for run in one.runs if _has(run, f"{statistic}_{name}_ms")]
            if runs:
                lines.append(
                    Line(
                        f"{one.label}, {statistic}",
                        [(run["output_throughput"], run[f"{statistic}_{name}_ms"]) for run in runs],
                        number,
                        dashed=dashed,
                        marks=True,
                        names=[level_name(run) for run in runs],
                    )
                )
    return plot(lines, title=what, x_label="output tokens/s", y_label="ms") if lines else ""


def _comparison(series: Sequence[Series]) -> str:
    """What the others measured at the same load, over the first."""
    first = {level_name(run): run for run in series[0].runs}
    rows = []
    for one in series[1:]:
        for run in one.runs:
            base = first.get(level_name(run))
            if base is None:
                continue
            ratios = [_ratio(run.get(name), base.get(name)) for name in COMPARED]
            rows.append([one.label, level_name(run), *ratios])
    if not rows:
        return ""
    note = f"Each figure over that of {series[0].label} at the same load."
    return f"<p>{escape(note)}</p>{_table(['server', 'load', *COMPARED.values()], rows)}"


def _ratio(value: Any, base: Any) -> float | None:
    return value / base if value is not None and base else None


def _run(series: Series, run: Run, *, is_open: bool) -> str:
    name = f"{series.label}, {level_name(run)}"
    parts = [f'<div class="plots">{_over_time(run)}{_curves(run)}</div>']
    parts += [f'<p class="note">{escape(str(note))}</p>' for note in run.get("notes", ())]
    for kind, found in run.get("error_kinds", {}).items():
        failed = f"failed, {kind}: {found['count']} ({'; '.join(map(str, found['examples']))})"
        parts.append(f'<p class="note">{escape(failed)}</p>')
    known = [(key, run[key]) for key in SETTINGS if _has(run, key)]
    known += _flat(run.get("client", {}), "client ") + _flat(run.get("environment", {}), "")
    told = [(key, value if isinstance(value, float) else str(value)) for key, value in known]
    parts.append(_table(["setting", "value"], told))
    opened = " open" if is_open else ""
    return f"<details{opened}><summary>{escape(name)}</summary>{''.join(parts)}</details>"


def _flat(found: Mapping[str, Any], before: str) -> list[tuple[str, Any]]:
    return [(f"{before}{key}", value) for key, value in found.items() if value is not None]


def _over_time(run: Run) -> str:
    """Four plots on the run's clock; none where the file has no time line."""
    found = run.get("timeline")
    if not found:
        return ""
    width = found["bin_s"]

    def line(
        label: str, name: str, colour: int, *, rate: bool = False, dashed: bool = False
    ) -> Line:
        values = found[name]
        scaled = [value / width for value in values] if rate else values
        return Line(label, [(n * width, v) for n, v in enumerate(scaled)], colour, dashed=dashed)

    requests = [
        line("to be sent", "arrived", 0, rate=True),
        line("completed", "completed", 1, rate=True),
    ]
    if any(found["failed"]):
        requests.append(line("failed", "failed", 2, rate=True, dashed=True))
    ttft = [line("median", "median_ttft_ms", 0), line("p99", "p99_ttft_ms", 0, dashed=True)]
    tokens = [line("output tokens/s", "output_tokens_per_s", 0)]
    time = "seconds from the start"
    return "".join(
        plot(lines, title=title, x_label=time, y_label=unit)
        for lines, title, unit in (
            (tokens, "Output tokens a second", "tokens/s"),
            (requests, "Requests a second", "requests/s"),
            ([line("open", "open", 0)], "Open requests", "requests"),
            (ttft, "Time to first token", "ms"),
        )
    )


def _curves(run: Run) -> str:
    """Each latency by the share of requests (of ITL: of chunks) that stays below it."""
    found = run.get("quantiles")
    if not found:
        return ""
    shares = found["shares"]
    return "".join(
        plot(
            [Line(what, [*zip(shares, found[name], strict=True)], number)],
            title=f"{what}, by percentile",
            x_label="percent of requests at or below",
            y_label="ms",
        )
        for number, (name, what) in enumerate(AGAINST.items())
        if found.get(name)
    )
