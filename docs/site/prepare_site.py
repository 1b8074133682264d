"""Makes the sources of the documentation's site: ``python docs/site/prepare_site.py build/docs``.

The pages are written to be read as plain files, too, so their links are those of the folders of
the repository, and some lead to files beside docs/. ``docs/README.md`` is the only list of the
pages: its headings are the site's sections, and the links below a heading are the section's pages,
in that order.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from command_page import command_page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = {
    "README.md": "project.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "LICENSE": "LICENSE.txt",
}
"""Files beside docs/ that pages link to, and their names in the site."""
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
ENTRY = re.compile(r"\[([^\]]+)\]\(([\w./-]+\.md)\)")
ROW = re.compile(r"^\|.*\|$", re.MULTILINE)
CODE = re.compile(r"`[^`\n]+`")
ITEM = re.compile(r"(?:[-*]|\d\.) ")
LINK = re.compile(r"""(\]\(|src=")([^)#"\s:]+)""")
"""The beginning of a link or picture up to its anchor; addresses with a scheme are left alone."""


def in_site(target: str, *, of_docs: bool) -> str:
    """Where a link of a page of docs/ (or, else, of one beside docs/) leads in the site."""
    if target.startswith("../") or (not of_docs and not target.startswith("docs/")):
        return OUTSIDE.get(target.removeprefix("../"), target)
    page = target.removeprefix("docs/")
    return "index.md" if page == "README.md" else page


def page_of_site(text: str, *, of_docs: bool) -> str:
    """A page with the site's links in place of the repository's, and its lists, and bars within the
    code of tables, as the site's reader of Markdown wants them."""
    rows = ROW.sub(lambda row: CODE.sub(lambda code: code[0].replace(r"\|", "|"), row[0]), text)
    lists = "\n".join(indented(rows.split("\n")))
    return LINK.sub(lambda found: found[1] + in_site(found[2], of_docs=of_docs), lists)


def indented(lines: list[str]) -> Iterator[str]:
    """Lines of Markdown whose list items hold their paragraphs four spaces in, as Python-Markdown
    wants it, where CommonMark asks for the width of the item's mark."""
    width, fenced, several = 0, False, False
    for line in lines:
        fence = line.lstrip().startswith("```")
        if not fenced and (item := ITEM.match(line)):
            if several:
                yield ""
            width, several = len(item[0]), False
        elif line.strip() and not line.startswith(" ") and not fenced:
            width, several = 0, False
        several = several or (not line and width > 0)
        inside = width and line.startswith(" " * width)
        yield " " * (4 - width) + line if inside else line
        fenced = fenced != fence


def navigation(index: str) -> list[dict[str, Any]]:
    """The site's sections, from the text of ``docs/README.md``. A page that several sections name
    belongs to the first."""
    named = set[str]()
    sections: list[dict[str, Any]] = []
    parts = SECTION.split(index)[1:]
    for title, text in zip(parts[::2], parts[1::2], strict=True):
        pages: list[str | dict[str, str]] = [] if sections else ["index.md"]
        for name, target in ENTRY.findall(text):
            page = in_site(target, of_docs=True)
            if page not in named:
                named.add(page)
                pages.append({name: page})
        sections.append({title: pages})
    return sections


def with_commands(sections: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The page that only the site has joins the reference."""
    for section in sections:
        section.get("Reference", []).append({"Commands and flags": "commands.md"})
    return sections


def prepare(folder: Path) -> None:
    """Writes mkdocs.yml with its navigation, and beside it the pages that it names."""
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    shutil.copytree(ROOT / "docs", pages, ignore=shutil.ignore_patterns("site", "README.md"))
    shutil.copytree(ROOT / "docs/site/theme", folder / "theme")
    for path in (ROOT / "docs").glob("*.md"):
        name = "index.md" if path.name == "README.md" else path.name
        (pages / name).write_text(page_of_site(path.read_text(), of_docs=True))
    for source, name in OUTSIDE.items():
        (pages / name).write_text(page_of_site((ROOT / source).read_text(), of_docs=False))
    (pages / "commands.md").write_text(page_of_site(command_page(), of_docs=True))
    sections = with_commands(navigation((ROOT / "docs/README.md").read_text()))
    nav = yaml.safe_dump({"nav": sections}, width=1000)
    settings = (ROOT / "docs/site/mkdocs.yml").read_text()
    (folder / "mkdocs.yml").write_text(f"{settings}\n{nav}")


if __name__ == "__main__":
    prepare(Path(sys.argv[1]))
