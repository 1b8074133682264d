"""Markdown of a growing text, drawn on a terminal of any size."""

from __future__ import annotations

import time

import pyte
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.commands.chat.markdown import (
    MAX_BLOCK,
    MarkdownStream,
    blocks,
    rendered,
    settled,
)

PIECES = st.sampled_from(
    ["word ", "**", "*", "`", "```\n", "\n", "\n\n", "- ", "1. ", "# ", "> ", "|", "|-|", "[", "](",
     ")", "<b>", "é", "漢", "&#27;", "  ", "---\n", "\x1b[2J", "\r", "\t"]
)  # fmt: skip


def screen_of(pieces: list[str], columns: int = 40, rows: int = 200) -> list[str]:
    """What a terminal shows when a text comes in these pieces, each drawn at once."""
    screen = pyte.Screen(columns, rows)
    screen.set_mode(pyte.modes.LNM)  # as the terminal's driver does, a newline begins at the margin
    stream = pyte.Stream(screen)
    drawn = MarkdownStream(stream.feed, lambda: (columns, rows), colour=True)
    for piece in pieces:
        drawn.feed(piece)
        drawn.draw()
    drawn.draw(whole=True)
    lines = [line.rstrip() for line in screen.display]
    while lines and not lines[-1]:
        lines.pop()
    return lines


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=25))
def test_a_text_in_any_pieces_is_the_screen_of_the_whole(pieces: list[str]) -> None:
    assert screen_of(pieces) == screen_of(["".join(pieces)])


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=25))
def test_the_blocks_of_a_text_are_the_text(pieces: list[str]) -> None:
    text = "".join(pieces).replace("\r", "")
    assert "".join(blocks(text)) == text


def test_a_block_is_not_closed_by_a_line_that_is_not_whole() -> None:
    assert settled("one\n\ntwo") == 0
    assert settled("one\n\ntwo\n") == len("one\n\n")
    assert settled("- word\n*") == 0  # "*word" would go on with the item, "*" and an end would not


@settings(max_examples=60, deadline=None)
@given(st.lists(PIECES, max_size=25))
def test_of_control_sequences_only_colours_are_drawn(pieces: list[str]) -> None:
    for line in rendered("".join(pieces), 40, colour=True):
        for part in line.split("\x1b")[1:]:
            body, end, _ = part.partition("m")
            assert end and body.startswith("[") and not body.strip("[0123456789;")


def test_html_is_text_and_a_line_end_stays_one() -> None:
    assert rendered("<div>one</div>\ntwo <br> three", 40, colour=False) == [
        "<div>one</div>", "two <br> three",
    ]  # fmt: skip


def test_a_block_without_end_is_shown_as_it_is_before_it_costs_much() -> None:
    written: list[str] = []
    stream = MarkdownStream(written.append, lambda: (80, 24), colour=False)
    began = time.monotonic()
    for _ in range(40):
        stream.feed("[" * 4096)
    stream.draw(whole=True)
    assert time.monotonic() - began < 30  # 2 s on a free machine; minutes without the limit
    assert "".join(written).endswith("[" * 4096 + "\n")
    assert "".join(written).count("[") >= 40 * 4096 > MAX_BLOCK
