"""The tables of docs/metrics.md, from the declarations of the metrics.

``.venv/bin/python tests/support/metrics_page.py`` writes them anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from penstock.protocol.process.metric_declarations import PREFIX, SECTIONS, Metric

PAGE = Path(__file__).resolve().parents[2] / "docs/metrics.md"
MARKS = "<!-- made by tests/support/metrics_page.py -->\n", "<!-- end -->\n"


def _row(metric: Metric) -> str:
    labels = (*metric.labels, "process") if metric.by_process else metric.labels
    kind = metric.kind + (", the largest" if metric.largest else "")
    named = ", ".join(f"`{label}`" for label in labels) or "–"
    return f"| `{PREFIX}{metric.name}` | {kind} | {named} | {metric.help} |"


def _buckets() -> list[str]:
    """Histograms of the same buckets in one line."""
    alike: dict[tuple[float, ...], list[str]] = {}
    for _, metrics in SECTIONS:
        for metric in metrics:
            if metric.buckets:
                alike.setdefault(metric.buckets, []).append(f"`{PREFIX}{metric.name}`")
    return [
        f"- {', '.join(names)}: {', '.join(f'{bound:g}' for bound in buckets)}"
        for buckets, names in alike.items()
    ]


def tables() -> str:
    lines: list[str] = []
    for title, metrics in SECTIONS:
        lines += [f"## {title}", "", "| name | kind | labels | what it says |"]
        lines += ["| --- | --- | --- | --- |", *map(_row, metrics), ""]
    return "\n".join([*lines, "## Buckets", "", *_buckets(), ""])


def page(text: str) -> str:
    """``text`` with its tables made anew."""
    begin, end = map(re.escape, MARKS)
    made = f"{MARKS[0]}\n{tables()}\n{MARKS[1]}"
    return re.sub(f"{begin}.*{end}", lambda _: made, text, flags=re.DOTALL)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
