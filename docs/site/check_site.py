"""Checks a built site of the documentation: ``python docs/site/check_site.py build/docs``.

No page loads anything from elsewhere, and each page of the site has the headings, lists, tables and
blocks of code that a plain view of its file has: two readers of Markdown agree on what it says.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path

from markdown_it import MarkdownIt

LOADING = {"src", "srcset", "poster", "data"}
LOADING_LINKS = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "manifest"}
COUNTED = ("h1", "h2", "h3", "h4", "li", "table", "tr", "td", "pre", "blockquote", "img", "strong")
POLICY = re.compile(r"""<meta http-equiv="Content-Security-Policy" content="default-src 'self';""")
ELSEWHERE = re.compile(r"^(?:[a-z]+:)?//", re.IGNORECASE)
STYLE_LOADS = re.compile(r"""url\(\s*["']?((?:https?:)?//[^"')]+)|@import\s+["']([^"']+)""")


class Read(HTMLParser):
    """The tags of a page: what they load, and how many the article has of each kind."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.counts: Counter[str] = Counter()
        self.depth_of_article = 0

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = {name: value or "" for name, value in attrs}
        names = LOADING if tag != "link" else set()
        if tag == "link" and LOADING_LINKS & set(values.get("rel", "").split()):
            names = {"href"}
        self.loaded += [values[name] for name in names & values.keys()]
        if tag == "article":
            self.depth_of_article += 1
        elif self.depth_of_article and tag in COUNTED:
            self.counts[tag] += 1

    def handle_endtag(self, tag: str) -> None:
        if tag == "article":
            self.depth_of_article -= 1


def read(html: str) -> Read:
    reader = Read()
    reader.feed(html)
    return reader


def loads_from_elsewhere(site: Path) -> list[str]:
    faults = []
    for page in site.rglob("*.html"):
        html = page.read_text()
        if not POLICY.search(html):
            faults.append(
                f"{page.name} has no policy that forbids its scripts to load from elsewhere"
            )
        faults += [
            f"{page.name} loads {address}"
            for address in read(html).loaded
            if ELSEWHERE.match(address)
        ]
    for sheet in site.rglob("*.css"):
        found = STYLE_LOADS.findall(sheet.read_text())
        faults += [f"{sheet.name} loads {''.join(address)}" for address in found]
    return faults


def plain_view(markdown: str) -> str:
    """HTML as of a page that shows Markdown files: CommonMark with tables."""
    html = MarkdownIt("commonmark").enable("table").render(markdown)
    return f"<article>{html}</article>"


def differences(pages: Path, site: Path) -> list[str]:
    faults = []
    for page in sorted(pages.glob("*.md")):
        plain = read(plain_view(page.read_text())).counts
        built = read((site / f"{page.stem}.html").read_text()).counts
        faults += [
            f"{page.name}: {plain[tag]} <{tag}> in a plain view, {built[tag]} in the site"
            for tag in COUNTED
            if plain[tag] != built[tag]
        ]
    return faults


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    faults = loads_from_elsewhere(folder / "site") + differences(folder / "pages", folder / "site")
    if faults:
        sys.exit("\n".join(faults))
