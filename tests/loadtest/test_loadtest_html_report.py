"""The page of ``bench report``: its figures are those of the files, and it needs nothing else."""

from __future__ import annotations

import json
import re
from array import array
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from penstock.loadtest import bench
from penstock.loadtest.client.load import Outcome
from penstock.loadtest.client.results import summarise
from penstock.loadtest.client.time_bins import quantiles, timeline
from penstock.loadtest.reports import bench_report
from penstock.loadtest.reports.html_report import COLUMNS, COMPARED, html_report
from penstock.loadtest.reports.report_style import STYLE
from penstock.loadtest.reports.result_files import BadResult, ReadRun, by_server, read_results
from penstock.loadtest.reports.svg_plot import HEIGHT, Line, plot, shown, ticks


def result(concurrency: int, *, step: float = 0.01, **fields: Any) -> dict[str, Any]:
    """A run as ``bench serve`` would write it; seconds a token ``step`` · concurrency."""
    outcomes = [
        Outcome(
            index=n, scheduled=n * 0.1, started=n * 0.1 + 0.001,
            stamps=array("d", [n * 0.1 + 0.05 + k * step * concurrency for k in range(5)]),
            last=n * 0.1 + 0.05 + 4 * step * concurrency,
            ended=n * 0.1 + 0.05 + 4 * step * concurrency,
            prompt_tokens=10, completion_tokens=5, failure=None, text="",
        )
        for n in range(20)
    ]  # fmt: skip
    duration = max(one.ended for one in outcomes)
    names = ("ttft", "tpot", "itl", "e2el", "queue")
    found = summarise(
        outcomes, duration, input_lens=[10] * 20, limits={}, names=names, percentiles=(50, 99)
    )
    known = {
        "date": "20261126-120000", "model_id": "m", "base_url": "http://127.0.0.1:1",
        "max_concurrency": concurrency, "request_rate": "inf", "latency_from": "intended",
        "notes": ["<b>noted</b>"], "error_kinds": {},
        "timeline": timeline(outcomes, duration, "intended"),
        "quantiles": quantiles(outcomes, "intended"),
        "environment": {"penstock": "0.1.0", "command": "penstock bench serve --x <y>"},
    }  # fmt: skip
    return found | known | fields


class Page(HTMLParser):
    """Cells of the tables with their unrounded values, and everything that could load something."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.values: list[float] = []
        self.cells: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.open.append(tag)
        self.loads += [tag] * (tag in ("script", "link", "img", "iframe", "object", "image", "use"))
        self.loads += [name for name in found if name in ("src", "href", "xlink:href", "action")]
        self.loads += [name for name in found if name.startswith("on")]
        if tag == "td" and found.get("data-value"):
            self.values.append(float(found["data-value"] or ""))

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "td":
            self.cells.append(data)


def saved(folder: Path, name: str, content: Any) -> str:
    path = folder / name
    path.write_text(json.dumps(content))
    return str(path)


@pytest.fixture
def page(tmp_path: Path) -> str:
    runs = [result(1), result(8)]
    other = [result(n, step=0.02, base_url="http://127.0.0.1:2") for n in (1, 8)]
    named = {"ours.json": runs, "b.json": other}
    files = [saved(tmp_path, name, {"runs": found}) for name, found in named.items()]
    output = tmp_path / "report.html"
    assert bench.main(["report", *files, "-o", str(output), "--label", "A & <A>"]) == 0
    return output.read_text()


def test_every_figure_of_the_files_stands_in_the_page(page: str) -> None:
    found = Page(page)
    for run in [result(n, step=step) for step in (0.01, 0.02) for n in (1, 8)]:
        for name in COLUMNS:
            if run.get(name) is not None:
                assert run[name] in found.values, name
                assert shown(run[name]) in found.cells, name


def test_the_comparison_is_with_the_first_at_the_same_load(page: str) -> None:
    found = Page(page)
    for concurrency in (1, 8):
        ours, theirs = result(concurrency), result(concurrency, step=0.02)
        for name in ("output_throughput", "median_tpot_ms"):
            assert theirs[name] / ours[name] in found.values
    assert "over that of A &amp; &lt;A&gt; at the same load" in page


def test_the_page_is_one_file_with_no_resource_from_elsewhere(page: str) -> None:
    assert Page(page).loads == []
    assert not re.search(r"url\(|@import|<script|javascript:", page)
    # Addresses stand in it as text alone.
    assert not re.search(r"""=["']?\s*https?://""", page)


def test_what_files_say_is_text_and_no_markup(page: str) -> None:
    assert "&lt;b&gt;noted&lt;/b&gt;" in page
    assert "<b>" not in page
    assert "A &amp; &lt;A&gt;" in page


def test_the_time_of_a_run_is_said_for_people(page: str) -> None:
    assert "2026-11-26 12:00:00" in page


def test_the_page_follows_a_light_or_a_dark_scheme(page: str) -> None:
    assert STYLE in page
    light, _, dark = STYLE.partition("@media (prefers-color-scheme:dark)")
    names = re.findall(r"--[a-z0-9]+(?=:)", light)
    assert len(names) > 10
    assert {n for n in names if f"{n}:" in dark.partition("}}")[0]} == set(names)
    assert not re.search(r"#[0-9a-f]{3,6}\b", STYLE.partition("*{")[2])  # colours by name alone
    assert not re.search(r'(?:fill|stroke)="', page)


def luminance(colour: str) -> float:
    """Relative luminance (WCAG 2.2)."""
    digits = colour if len(colour) == 6 else "".join(2 * digit for digit in colour)
    parts = [int(digits[n : n + 2], 16) / 255 for n in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def test_lines_and_words_can_be_told_from_the_page_in_both_schemes() -> None:
    for block in re.findall(r":root\{(.*?)\}", STYLE, re.DOTALL):
        colours = dict(re.findall(r"--(\w+):#([0-9a-f]{3,6})", block))
        ground = luminance(colours["card"])
        for name, least in {"ink": 7.0, "soft": 4.5, **{f"s{n}": 3.0 for n in range(8)}}.items():
            low, high = sorted((ground, luminance(colours[name])))
            assert (high + 0.05) / (low + 0.05) >= least, name


def test_in_a_browser_it_loads_nothing_fits_a_phone_and_follows_the_scheme(
    page: str, tmp_path: Path
) -> None:
    from support.pipeline.browser import DESKTOP, PHONE, chromium

    address = (tmp_path / "report.html").as_uri()
    grounds, asked = set(), []
    with chromium() as browser:
        for size in (DESKTOP, PHONE):
            for scheme in ("light", "dark"):
                view = browser.new_page(viewport=size, color_scheme=scheme)
                view.on("request", lambda request: asked.append(request.url))
                view.goto(address)
                grounds.add(view.evaluate("getComputedStyle(document.body).backgroundColor"))
                assert view.evaluate("document.documentElement.scrollWidth") <= size["width"]
                stroke = "getComputedStyle(document.querySelector('path.line.c1')).stroke"
                assert view.evaluate(stroke) not in ("none", "rgb(0, 0, 0)")
                view.close()
    assert set(asked) == {address}
    assert len(grounds) == 2


def test_every_plot_is_well_formed_and_has_a_name(page: str) -> None:
    plots = re.findall(r"<svg viewBox.*?</svg>", page)
    assert len(plots) > 20
    for text in plots:
        root = ElementTree.fromstring(text)
        assert root.get("aria-label") or root.get("class") == "key"
    titles = [root.get("aria-label") for root in map(ElementTree.fromstring, plots)]
    for name in ("Time to first token", "Output tokens a second", "Open requests"):
        assert name in titles


def test_a_point_is_where_its_value_is() -> None:
    text = plot(
        [Line("a", [(0.0, 0.0), (50.0, 10.0), (100.0, 20.0)], marks=True, names=["x", "y", "z"])],
        title="t", x_label="x", y_label="y",
    )  # fmt: skip
    (path,) = re.findall(r'class="line c0" d="([^"]*)"', text)
    ((x0, y0), (x1, y1), (x2, y2)) = [
        (float(x), float(y)) for x, y in re.findall(r"[ML]([\d.]+) ([\d.]+)", path)
    ]
    assert (x1 - x0, y1 - y0) == pytest.approx((x2 - x1, y2 - y1), abs=0.2)
    assert y0 > y2  # up is more
    assert all(0 < y < HEIGHT for y in (y0, y1, y2))
    assert "<title>a y: 50, 10</title>" in text


def test_names_of_points_that_would_lie_on_each_other_are_left_out() -> None:
    """Whoever points at one still reads all of it."""
    lines = [
        Line(server, [(100.0, 5.0), (200.0, value)], 0, names=["1", "2"], marks=True)
        for server, value in (("a", 5.0), ("b", 5.1), ("c", 9.0))
    ]
    text = plot(lines, title="t", x_label="", y_label="")
    assert re.findall(r'class="name"[^>]*>(\w+)', text) == ["1", "2", "2"]
    assert text.count("<title>") == 6


def test_a_gap_interrupts_a_line_and_a_point_between_two_gaps_is_a_dot() -> None:
    points = [(0.0, 1.0), (1.0, None), (2.0, 3.0), (3.0, 4.0)]
    text = plot([Line("a", points)], title="t", x_label="", y_label="")
    (path,) = re.findall(r'class="line c0" d="([^"]*)"', text)
    assert re.sub(r"[\d. -]+", "", path) == "Mmaa" + "ML"


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (0, 0.003), (0, 17), (0, 99_999), (5, 5), (0, 0), (-3, 8)]
)
def test_ticks_are_round_and_hold_all_values(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 2 <= len(found) <= 8
    assert found[0] <= low
    assert found[-1] >= high
    step = found[1] - found[0]
    mantissa = float(f"{step:e}".partition("e")[0])
    assert mantissa == pytest.approx(min((1, 2, 2.5, 5), key=lambda m: abs(m - mantissa)))


def test_numbers_have_about_three_digits() -> None:
    assert [shown(v) for v in (0, 0.012345, 1.5, 35.26, 12345.6, 3)] == [
        "0", "0.0123", "1.5", "35.3", "12,346", "3",
    ]  # fmt: skip


def test_a_single_run_and_a_file_of_vllms_tool_make_a_page_too(tmp_path: Path) -> None:
    theirs = {
        "date": "20260101-000000", "backend": "openai", "model_id": "m", "num_prompts": 5,
        "request_rate": "inf", "max_concurrency": None, "duration": 2.0, "completed": 5,
        "request_throughput": 2.5, "output_throughput": 321.5, "mean_ttft_ms": 12.5,
        "median_ttft_ms": 11.25, "p99_ttft_ms": 30.0,
    }  # fmt: skip
    series = read_results([saved(tmp_path, "vllm.json", theirs)])
    found = Page(html_report(series, "t"))
    assert {321.5, 11.25, 30.0} <= set(found.values)
    only = Page(html_report(read_results([saved(tmp_path, "one.json", result(4))]), "t"))
    assert result(4)["output_throughput"] in only.values


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "no result file"),
        ("[]", "no runs"),
        ('{"a": 1}', "required field `duration`"),
        ("[3]", "got `int`"),
        ("[" * 100_000, "no result file"),
    ],
)
def test_a_file_that_is_no_result_is_named(
    tmp_path: Path, content: str, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    with pytest.raises(BadResult, match=r"x\.json"):
        read_results([str(path)])
    assert bench_report.main([str(path)]) == 2
    assert words in capsys.readouterr().err
    assert bench_report.main([str(tmp_path / "none.json")]) == 2


FOREIGN = "<script>alert(1)</script>"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"error_kinds": {"x": {"count": FOREIGN, "examples": []}}}, "$.error_kinds[...].count"),
        ({"error_kinds": {"x": {"count": 1}}}, "`examples` - at `$.error_kinds[...]`"),
        ({"client": None}, "$.client"),
        ({"environment": [1]}, "$.environment"),
        ({"notes": None}, "$.notes"),
        ({"timeline": {"bin_s": 1}}, "`arrived` - at `$.timeline`"),
        ({"timeline": {**result(1)["timeline"], "bin_s": 0}}, "$.timeline.bin_s"),
        ({"quantiles": {"shares": [1, 2], "ttft": [3]}}, "ttft: 1 values for 2 shares"),
        ({"median_ttft_ms": FOREIGN}, "$.median_ttft_ms"),
        ({"request_rate": FOREIGN}, "$.request_rate"),
        ({"max_concurrency": FOREIGN}, "$.max_concurrency"),
        ({"dataset_name": "trace", "trace_speed": None}, "$.trace_speed"),
        ({"burst_size": 3}, "burst_size needs burst_interval"),
        ({"ramp_up_strategy": "linear"}, "ramp_up_start_rps"),
    ],
)
def test_a_field_of_the_wrong_type_is_named_with_its_file_and_run(
    fields: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(tmp_path, "x.json", [result(1), result(1, **fields)])
    output = tmp_path / "report.html"
    assert bench_report.main([path, "-o", str(output)]) == 2
    told = capsys.readouterr().err
    assert f"{path}, run 2: " in told
    assert words in told
    assert not output.exists()


def test_no_text_of_a_run_becomes_markup() -> None:
    run = result(
        1, notes=[FOREIGN], error_kinds={FOREIGN: {"count": FOREIGN, "examples": [FOREIGN]}},
        client={FOREIGN: FOREIGN}, environment={FOREIGN: FOREIGN}, date=FOREIGN, model_id=FOREIGN,
        base_url=FOREIGN, max_concurrency=FOREIGN, median_itl_ms=FOREIGN, endpoint=[FOREIGN],
    )  # fmt: skip
    page = html_report(by_server([run, run | {"base_url": "other"}]), FOREIGN)
    assert "script" not in Page(page).open
    assert page.count("&lt;script&gt;") > 10


def test_the_type_of_each_figure_is_checked_when_a_file_is_read() -> None:
    assert {*COLUMNS, *COMPARED} <= {*ReadRun.__struct_fields__}


@pytest.mark.parametrize("name", ["a.json", "./a.json", "link.json"])
def test_a_page_is_not_written_over_a_file_that_it_is_made_of(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    other, path = saved(tmp_path, "b.json", result(2)), tmp_path / "a.json"
    saved(tmp_path, "a.json", result(1))
    (tmp_path / "link.json").symlink_to("a.json")
    before = path.read_bytes()
    with pytest.raises(SystemExit) as ended:
        bench_report.main([other, "a.json", "-o", name])
    assert ended.value.code == 2
    assert f"--output {name}: it is a.json" in capsys.readouterr().err
    assert path.read_bytes() == before
