"""``penstock bench report``: one HTML page of result files of ``bench serve``.

Exit codes: 0, 2 wrong flags or files.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.protocol.config.flags import FlagParser

WRONG_FLAGS = 2


def parser() -> FlagParser:
    found = FlagParser(
        "penstock bench report",
        usage="penstock bench report FILE … [flags]",
        description="Make one HTML page of result files: tables, throughput against latency, time "
        "lines; several files are compared with the first.",
        allow_abbrev=False,
    )
    found.add_argument(
        "FILE", nargs="+", help="what `penstock bench serve --save-result` or vLLM's tool wrote"
    )
    found.add_argument(
        "-o", "--output", default="report.html", metavar="FILE", help="(default: report.html)"
    )
    found.add_argument(
        "--label",
        action="append",
        default=[],
        metavar="NAME",
        help="of the next file, instead of its name; may be repeated",
    )
    found.add_argument("--title", default="Load tests", help="(default: %(default)s)")
    return found


def main(arguments: Sequence[str]) -> int:
    """Run with these flags. Returns the exit code."""
    reader = parser()
    parsed = reader.parse_args(arguments)
    if len(parsed.label) > len(parsed.FILE):
        reader.error(f"--label: {len(parsed.label)} names for {len(parsed.FILE)} files")
    if (read := _among(parsed.output, parsed.FILE)) is not None:
        reader.error(f"--output {parsed.output}: it is {read}, which is read; choose another name")
    from penstock.loadtest.reports.html_report import html_report
    from penstock.loadtest.reports.result_files import BadResult, read_results

    try:
        page = html_report(read_results(parsed.FILE, parsed.label), parsed.title)
        Path(parsed.output).write_text(page, encoding="utf-8")
    except BadResult as error:
        print(f"penstock: {error}", file=sys.stderr)
        return WRONG_FLAGS
    except OSError as error:
        print(f"penstock: {parsed.output}: {error.strerror}", file=sys.stderr)
        return WRONG_FLAGS
    print(f"report in {parsed.output}")
    return 0


def _among(output: str, paths: Sequence[str]) -> str | None:
    """Which of the files ``output`` is, by whatever name."""
    if not os.path.exists(output):
        return None
    return next(
        (path for path in paths if os.path.exists(path) and os.path.samefile(path, output)), None
    )
