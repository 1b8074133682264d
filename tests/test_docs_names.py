"""Files and metrics that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from penstock.protocol.process.metric_declarations import METRICS, PREFIX

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = (
    "client",
    "demo",
    "deploy",
    "docs",
    "kernels",
    "loadtest",
    "protocol",
    "services",
    "tests",
)
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FILES = {
    path.relative_to(ROOT).as_posix()
    for folder in FOLDERS
    for path in (ROOT / folder).rglob("*")
    if path.is_file() and "node_modules" not in path.parts
}
ENDINGS = {
    "/".join(["", *parts[at:]])
    for parts in (name.split("/") for name in FILES)
    for at in range(len(parts))
}
NAMED = re.compile(r"`([\w/-]+\.(?:py|proto|jsonl|cfg))`")
"""``placement.py``, ``services/router/placement.py`` or the end of such a path."""
MODULE = re.compile(r"python3? -m (penstock\.[\w.]*\w)")
NO_METRICS = {"pb2", "pb2_grpc", "head_start"}
"""What else begins as metrics do."""
SERIES = re.compile("_(bucket|sum|count)$")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_source_file_that_a_page_names_is_there(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    assert [name for name in NAMED.findall(prose) if f"/{name}" not in ENDINGS] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_module_that_a_page_runs_is_there(page: Path) -> None:
    for name in MODULE.findall(page.read_text()):
        path = name.removeprefix("penstock.").replace(".", "/")
        assert {f"{path}.py", f"{path}/__main__.py"} & FILES, f"{page.name} runs {name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_metric_that_a_page_names_is_declared(page: Path) -> None:
    named = set(re.findall(rf"(?<!\w){PREFIX}(\w+)", page.read_text())) - NO_METRICS
    assert {of_metric(name) for name in named} <= METRICS.keys()


def of_metric(name: str) -> str:
    """The metric that a series is of: histograms have several."""
    whole = SERIES.sub("", name)
    found = METRICS.get(whole)
    return whole if found is not None and found.kind == "histogram" else name


def test_only_histograms_have_several_series() -> None:
    assert of_metric("step_seconds_bucket") == "step_seconds"
    assert of_metric("requests_running_count") == "requests_running_count"
