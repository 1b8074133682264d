"""Markdown on a terminal while it is being written.

Blocks that nothing can change any more are drawn once; the last one is drawn again with each piece,
from the first line that differs. Lines that have left the screen at its top cannot be drawn again,
and stay as they were.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.token import Token
from rich.console import Console, ConsoleOptions, RenderResult
from rich.markdown import CodeBlock, Heading, Markdown
from rich.syntax import Syntax

from penstock.services.commands.printable import only_colours, printable

FRAME_S = 0.05
"""Shortest time between two drawings."""
DRAWING_SHARE = 0.2
"""Most of the time that may be spent on drawing: a long block is drawn less often."""
MAX_BLOCK = 32_768
"""Characters of one block that are read as Markdown, which takes 1 to 2 s where they are hostile;
what follows in the answer is shown as it is."""
CODE_THEME = "ansi_dark"
"""The terminal's own colours, on the terminal's own background."""


class _PlainHeading(Heading):
    """At the margin, without a frame."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        self.text.justify = "left"
        yield self.text


class _PlainCode(CodeBlock):
    """Without a background or margin, so that it can be copied."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        code = str(self.text).rstrip()
        yield Syntax(
            code, self.lexer_name, theme=self.theme, word_wrap=True, background_color="default"
        )


class _ChatMarkdown(Markdown):
    elements = {
        **Markdown.elements,
        "heading_open": _PlainHeading,
        "fence": _PlainCode,
        "code_block": _PlainCode,
    }


_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_LINE = re.compile(r"[^\n]*\n|[^\n]+")
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["strikethrough", "table"])
"""HTML is text: nothing may vanish."""


def _keep_line_ends(tokens: Iterable[Token]) -> None:
    """A newline within a paragraph stays one, as models mean it."""
    for token in tokens:
        if token.type == "softbreak":
            token.type = "hardbreak"
        _keep_line_ends(token.children or ())


def rendered(text: str, width: int, *, colour: bool) -> list[str]:
    """The lines of a Markdown text; of control sequences they hold colours at most."""
    tokens = _PARSER.parse(printable(text))
    _keep_line_ends(tokens)
    markdown = _ChatMarkdown("", code_theme=CODE_THEME, hyperlinks=False)
    markdown.parsed = tokens
    console = Console(
        force_terminal=True, width=max(width, 8), no_color=not colour, highlight=False, emoji=False,
        legacy_windows=False,
    )  # fmt: skip
    with console.capture() as captured:
        console.print(markdown)
    lines = [line.rstrip(" ") for line in only_colours(captured.get()).split("\n")]
    filled = [place for place, line in enumerate(lines) if _COLOUR.sub("", line).strip()]
    return lines[filled[0] : filled[-1] + 1] if filled else []


def blocks(text: str) -> list[str]:
    """The text in pieces, a block in each: a paragraph, a list, a table, a fence with its code."""
    lines = _LINE.findall(text)
    begins = [token.map[0] for token in _PARSER.parse(text) if token.level == 0 and token.map]
    begins = sorted({0, *begins[1:]})
    return ["".join(lines[a:b]) for a, b in pairwise([*begins, len(lines)])]


def settled(text: str) -> int:
    """How much of a growing text stands in blocks that nothing behind them can change any more.

    The structure of Markdown is decided line by line, so it is all ahead of the last block that
    begins in a whole line.
    """
    whole = text[: text.rfind("\n") + 1]
    return len(whole) - len(blocks(whole)[-1]) if whole else 0


class MarkdownStream:
    """Draws a growing text. The cursor stands at the beginning of the line below it."""

    def __init__(
        self, write: Callable[[str], Any], size: Callable[[], tuple[int, int]], *, colour: bool
    ) -> None:
        """``size``: columns and lines of the terminal, now."""
        self._write = write
        self._size = size
        self._colour = colour
        self._open = ""
        """The text of the last block."""
        self._shown: list[str] = []
        """Its lines as they stand on the terminal."""
        self._any = False
        """There is a block above it."""
        self._drawn_at = 0.0
        self._drawing_s = 0.0
        self._behind = False
        self._drawn = 0
        """Characters of the last block that are drawn."""
        self._plain = False
        """A block was too long."""

    def feed(self, text: str) -> None:
        if self._plain:
            self._write(printable(text))
            return
        self._open += printable(text)
        self._behind = True
        if self.due() == 0:
            self.draw()

    def due(self) -> float | None:
        """In how many seconds ``draw`` is to be called; ``None``: all is drawn."""
        if not self._behind:
            return None
        wait = max(FRAME_S, self._drawing_s / DRAWING_SHARE)
        return max(0.0, self._drawn_at + wait - time.monotonic())

    def draw(self, *, whole: bool = False) -> None:
        """Draw what has come. ``whole``: nothing more will."""
        began = time.monotonic()
        self._behind = False
        if self._plain:
            if whole:
                self._write("\n")
            return
        if len(self._open) > MAX_BLOCK:
            self._write(self._open[self._drawn :] + ("\n" if whole else ""))
            self._plain = True
            return
        cut = len(self._open) if whole else settled(self._open)
        closed = self._lines(self._open[:cut])
        self._open = self._open[cut:]
        self._any = self._any or bool(closed)
        self._draw_lines(closed + self._lines(self._open))
        self._shown = self._shown[len(closed) :]
        self._drawn = len(self._open)
        self._drawn_at = time.monotonic()
        self._drawing_s = self._drawn_at - began

    def _lines(self, text: str) -> list[str]:
        """Of all blocks of a text, with an empty one between two of them."""
        found: list[str] = []
        for block in blocks(text):
            lines = rendered(block, self._size()[0] - 1, colour=self._colour)
            if lines and (found or self._any):
                found.append("")
            found += lines
        return found

    def _draw_lines(self, lines: list[str]) -> None:
        """In the place of those that are shown: from the first one that differs, but what has left
        the screen stays."""
        gone = max(0, len(self._shown) - (self._size()[1] - 1))
        same = 0
        while same < min(len(lines), len(self._shown)) and lines[same] == self._shown[same]:
            same += 1
        same = max(same, min(gone, len(lines)))
        if up := len(self._shown) - same:
            self._write(f"\x1b[{up}A\r\x1b[J")
        self._write("".join(f"{line}\n" for line in lines[same:]))
        self._shown = lines
