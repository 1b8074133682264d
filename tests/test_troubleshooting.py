"""The pages are found, their links lead somewhere, and the messages quoted are the program's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.pipeline.bad_folders import CASES, Case

ROOT = Path(__file__).resolve().parent.parent
PAGE = (ROOT / "docs/troubleshooting.md").read_text()
QUOTED = sorted(
    {
        fragment.strip()
        for row in re.findall(r"^\| (`.*?`) \| ", PAGE, re.MULTILINE)
        for message in re.findall(r"`([^`]+)`", row)
        for fragment in re.split(r"…|[A-Z]{3,}(?::[A-Z]{3,})?|\d{3,}", message)
        if len(fragment.strip()) >= 10
    }
)


def source() -> str:
    """All of the program, with literals that continue on the next line put together."""
    files = [
        f for folder in ("client", "services", "protocol") for f in (ROOT / folder).rglob("*.py")
    ]
    text = "\n".join(file.read_text() for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


SOURCE = source()


@pytest.mark.parametrize("fragment", QUOTED)
def test_each_quoted_message_is_one_of_the_program(fragment: str) -> None:
    pieces = [p for p in re.split(r"\d+(?:\.\d+)?", fragment) if len(p.strip()) >= 6]
    for piece in pieces:
        assert piece.strip(" ():;") in SOURCE


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_each_bad_folder_has_a_row_with_what_its_message_says(case: Case) -> None:
    (row,) = re.findall(rf"^\| {re.escape(case.name)} \| (.*) \|$", PAGE, re.MULTILINE)
    for part in case.says:
        assert part in row


def test_the_index_names_every_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index, page.name


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=lambda p: p.name)
def test_each_link_between_the_pages_leads_to_a_heading(page: Path) -> None:
    for name, anchor in re.findall(r"\]\(([\w./-]*\.md)?(#[\w-]+)?\)", page.read_text()):
        target = (page.parent / name) if name else page
        assert target.exists(), name
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(), re.MULTILINE)
            anchors = {
                "#" + re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
                for heading in headings
            }
            assert anchor in anchors, f"{name}{anchor}"
