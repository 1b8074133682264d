"""Log lines for people: aligned, coloured only where colour is wanted, one line an event."""

from __future__ import annotations

import os
import pty
import re
from collections.abc import Iterator

import pytest

from penstock.protocol.config.terminal import Style, style_of
from penstock.protocol.process.console import record_line, rendered

PLAIN, COLOUR = Style(), Style(colour=True, cursor=True)
RECORD = {
    "timestamp": "2026-01-02T03:04:05.678901Z",
    "level": "warning",
    "service": "worker",
    "pid": 7,
    "event": "step failed",
    "step": 12,
    "reason": "out of memory",
}


@pytest.fixture
def terminal() -> Iterator[int]:
    master, slave = pty.openpty()
    yield slave
    os.close(slave)
    os.close(master)


def test_a_line_has_the_time_the_level_the_process_the_event_and_its_fields() -> None:
    line = record_line(RECORD, PLAIN)
    assert re.fullmatch(r"\d\d:\d\d:05\.678", line[:12])
    assert line[12:] == "  warn   worker       step failed  step=12 reason='out of memory'"


def test_the_launchers_name_for_a_process_is_shown() -> None:
    assert "  worker 3     step failed" in record_line(RECORD, PLAIN, "worker 3")
    assert "  tokenizer 1  ready" in record_line(
        {"event": "ready", "process": "tokenizer 1"}, PLAIN
    )


def test_columns_are_aligned_whatever_the_level_and_the_process() -> None:
    lines = [
        record_line({**RECORD, "level": level, "event": "EVENT"}, PLAIN, process)
        for level in ("debug", "info", "warning", "error", "critical")
        for process in ("router", "scheduler 0", "tokenizer 1")
    ]
    assert len({line.index("EVENT") for line in lines}) == 1


def test_nothing_in_a_value_moves_the_cursor_or_begins_a_line() -> None:
    nasty = "a\r\x1b[2J\x1b]0;title\x07b\n2026 forged \u202e\x85"
    line = record_line({**RECORD, "event": nasty, "reason": nasty, nasty: 1}, PLAIN)
    assert line.isprintable()


def test_a_traceback_stands_below_its_line_and_is_indented() -> None:
    line = record_line({**RECORD, "exception": "Traceback:\n  File x\nValueError: y"}, PLAIN)
    assert [row[:4] for row in line.split("\n")[1:]] == ["    "] * 3
    assert line.endswith("ValueError: y")


def test_what_a_library_prints_looks_like_a_line_of_its_process() -> None:
    shown = rendered(b"UserWarning: \x1b[31mold\n", "worker 0", PLAIN).decode()
    assert re.fullmatch(r"[\d:.]{12}         worker 0     UserWarning: \\x1b\[31mold\n", shown), (
        shown
    )
    shown = rendered(b'{"event": "ok", "level": "info", "pid": 3}\n', "worker 0", PLAIN).decode()
    assert shown[12:] == "  info   worker 0     ok\n"


def test_colour_changes_only_colour() -> None:
    plain, coloured = record_line(RECORD, PLAIN), record_line(RECORD, COLOUR)
    assert "\x1b[" not in plain
    assert "\x1b[1;33mwarn\x1b[0m" in coloured
    assert re.sub(r"\x1b\[[\d;]*[mK]", "", coloured) == plain


@pytest.mark.parametrize(
    ("environment", "style"),
    [
        ({"TERM": "xterm-256color"}, Style(colour=True, cursor=True)),
        ({"TERM": "xterm-256color", "NO_COLOR": "1"}, Style(cursor=True)),
        ({"TERM": "xterm", "NO_COLOR": ""}, Style(colour=True, cursor=True)),
        ({"TERM": "dumb"}, Style()),
        ({}, Style()),
    ],
)
def test_a_terminal_shows_what_its_user_wants(
    terminal: int, environment: dict[str, str], style: Style
) -> None:
    assert style_of(terminal, environment) == style


def test_what_is_no_terminal_is_plain() -> None:
    with open(os.devnull, "w") as nowhere:
        assert style_of(nowhere.fileno(), {"TERM": "xterm"}) == Style()
        assert style_of(10_000, {"TERM": "xterm"}) == Style()
