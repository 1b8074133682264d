"""Commands and other examples of the documentation, read from its pages."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SHELL = {"sh", "bash", ""}
_FENCED = re.compile(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?<=\n\n)((?:    \S[^\n]*\n(?:     *\S[^\n]*\n|\n(?=    ))*)+)")
_ASSIGNMENT = re.compile(r"[A-Z]\w*=")
_COMMENT = re.compile(r"(^|\s+)#[^\n]*$", re.MULTILINE)
_COMMAND = re.compile(r"(\S*/)?(penstock|python3?|make|curl|docker|helm|pip) \S+( \S+)*$")
"""A line that is a command, in a block that may be something else: a table has wider gaps."""
_INLINE = re.compile(r"`((?:penstock|make) [^`\n]+)`")


class Block(NamedTuple):
    page: str
    kind: str
    """The language that is named behind its fence; empty: none, or the block is indented."""
    text: str


def blocks() -> Iterator[Block]:
    """All blocks of code of all pages, without the spaces that their list items give them."""
    for page in PAGES:
        text = page.read_text()
        for indent, kind, body in _FENCED.findall(text):
            yield Block(page.name, kind, re.sub(f"^{indent}", "", body, flags=re.MULTILINE))
        for body in _INDENTED.findall(_FENCED.sub("\n", text)):
            yield Block(page.name, "", re.sub(r"^    ", "", body, flags=re.MULTILINE))


class Command(NamedTuple):
    page: str
    words: tuple[str, ...]
    """Without variables in front and comments behind."""


def commands() -> Iterator[Command]:
    """Each command of each shell block, and of blocks without a language what looks like one. None
    that leaves something out (``…``)."""
    for block in blocks():
        text = _COMMENT.sub("", re.sub(r"\\\n\s*", " ", block.text))
        lines = [text] if block.kind in SHELL - {""} else filter(_COMMAND.match, text.splitlines())
        for line in lines if block.kind in SHELL else ():
            yield from _of_shell(block.page, line)


def mentions() -> Iterator[Command]:
    """Commands of Penstock in the midst of a sentence, often without what they need."""
    for page in PAGES:
        for text in _INLINE.findall(_FENCED.sub("", page.read_text())):
            yield from _of_shell(page.name, text)


def _of_shell(page: str, text: str) -> Iterator[Command]:
    reader = shlex.shlex(text, posix=True, punctuation_chars=";&|\n")
    reader.whitespace, reader.whitespace_split, reader.commenters = " \t", True, ""
    words: list[str] = []
    for word in (*reader, ";"):
        if word.strip(";&|\n") == "":
            if words and "…" not in "".join(words):
                end = words.index(">") if ">" in words else len(words)
                yield Command(page, tuple(words[:end]))
            words = []
        elif words or not _ASSIGNMENT.match(word):
            words.append(word)
