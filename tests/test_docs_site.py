"""The site of the documentation: its sections, its links, and what it loads."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
from check_site import differences, loads_from_elsewhere
from command_page import command_page
from prepare_site import OUTSIDE, navigation, page_of_site, prepare

from penstock.protocol.config.flags import TEST_ONLY
from penstock.protocol.config.resolve import fields
from penstock.services.command_table import COMMANDS, HEADINGS

ROOT = Path(__file__).resolve().parent.parent
POLICY = """<meta http-equiv="Content-Security-Policy" content="default-src 'self';">"""


def test_each_page_stands_once_in_a_section_of_the_site() -> None:
    sections = navigation((ROOT / "docs/README.md").read_text())
    pages = [
        page if isinstance(page, str) else next(iter(page.values()))
        for section in sections
        for page in next(iter(section.values()))
    ]
    there = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    beside = {name for name in OUTSIDE.values() if name.endswith(".md")}
    assert sorted(pages) == sorted({"index.md"} | there | beside)


def test_links_of_the_repository_become_links_of_the_site() -> None:
    of_docs = partial(page_of_site, of_docs=True)
    assert of_docs("[a](../README.md#two-commands)") == "[a](project.md#two-commands)"
    assert of_docs("[a](README.md), [b](cpu.md#x)") == "[a](index.md), [b](cpu.md#x)"
    assert of_docs("[a](https://keda.sh)") == "[a](https://keda.sh)"
    of_root = partial(page_of_site, of_docs=False)
    assert of_root("[a](docs/cpu.md), [b](LICENSE)") == "[a](cpu.md), [b](LICENSE.txt)"
    assert of_root('<img src="docs/images/a.png">') == '<img src="images/a.png">'


def test_paragraphs_of_list_items_are_where_both_readers_of_markdown_see_them() -> None:
    page = "- one\n\n  more of it\n- two\n1. three\n\n   more\n\nEnd.\n  not in a list\n"
    assert page_of_site(page, of_docs=True) == (
        "- one\n\n    more of it\n\n- two\n1. three\n\n    more\n\nEnd.\n  not in a list\n"
    )
    row = r"| `a\|b` | c \| d |"
    assert page_of_site(row, of_docs=True) == r"| `a|b` | c \| d |"


def test_what_a_page_loads_from_elsewhere_is_found(tmp_path: Path) -> None:
    (tmp_path / "good.html").write_text(
        f'{POLICY}<a href="https://a.example"></a><img src="a.png">'
    )
    assert loads_from_elsewhere(tmp_path) == []
    (tmp_path / "bad.html").write_text(
        '<script src="//cdn.example/a.js"></script><link rel="icon" href="https://a.example/b">'
    )
    (tmp_path / "bad.css").write_text(
        "@import 'https://a.example/c'; p { background: url(https://d.example) }"
    )
    faults = "\n".join(loads_from_elsewhere(tmp_path))
    assert "no policy" in faults
    for address in ("//cdn.example/a.js", "example/b", "example/c", "d.example"):
        assert address in faults


def test_a_list_that_the_site_shows_as_a_paragraph_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("Text\n- one\n- two\n")
    (tmp_path / "a.html").write_text("<article><p>Text - one - two</p></article>")
    assert differences(tmp_path, tmp_path) == ["a.md: 2 <li> in a plain view, 0 in the site"]


class QuietHandler(SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


def test_the_page_of_commands_has_every_command_and_each_setting_of_a_server_once() -> None:
    page = command_page()
    names = [name for heading in HEADINGS.values() for name in heading]
    assert re.findall(r"^### penstock (\w+)$", page, re.MULTILINE) == names
    variables = re.findall(r"\(`(PENSTOCK_\w+)`\) \|$", page, re.MULTILINE)
    shown = {field.variable for name, field in fields().items() if name not in TEST_ONLY}
    assert set(variables) <= shown
    served = fields(COMMANDS["serve"].groups)
    told = page[: page.index("### penstock plan")]
    assert [name for name, one in served.items() if f"`{one.variable}`" not in told] == [
        name for name in served if name in TEST_ONLY
    ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of the built site."""
    pytest.importorskip("material", reason="needs mkdocs-material")
    folder = tmp_path_factory.mktemp("docs")
    prepare(folder)
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "-q", "-f", "mkdocs.yml"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    handler = partial(QuietHandler, directory=folder / "site")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.slow  # CI builds and checks the site; this looks at it in a browser
@pytest.mark.timeout(600)
def test_each_page_fits_a_phone_asks_no_other_server_and_search_finds_it(site: str) -> None:
    from support.pipeline.browser import chromium

    with chromium() as browser:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        asked: list[str] = []
        faults: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda said: faults.append(said.text) if said.type == "error" else None)
        for path in sorted((ROOT / "docs").glob("*.md")):
            name = "index" if path.name == "README.md" else path.stem
            page.goto(f"{site}/{name}.html")
            width = page.evaluate("document.documentElement.scrollWidth")
            assert width <= 390, f"{name} is {width} pixels wide"
        page.goto(f"{site}/index.html")
        page.locator("label[for=__search]").first.click()
        page.locator(".md-search__input").press_sequentially("prefix cache")
        page.locator(".md-search-result__item").first.wait_for(timeout=60_000)
    elsewhere = [url for url in asked if not url.startswith((site, "data:", "blob:"))]
    assert elsewhere == [] and faults == []
