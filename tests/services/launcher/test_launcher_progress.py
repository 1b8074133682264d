"""What a user sees while weights are read: a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

import pytest

from penstock.protocol.config.terminal import Style
from penstock.protocol.process import logs
from penstock.protocol.process.console import record_line
from penstock.protocol.wire.messages.membership import Phase
from penstock.services.launcher import progress
from penstock.services.launcher.progress import StartupLines

Clock = Callable[[float], None]
BEFORE = re.compile(r"^\d\d:\d\d:\d\d\.\d{3}  info   ")
CURSOR = Style(cursor=True)


class Terminal:
    """Takes log lines and what is drawn between them, and knows what is visible."""

    def __init__(self) -> None:
        self.written = ""

    def info(self, event: str, **fields: str) -> None:
        self.written += record_line({"event": event, "level": "info", **fields}, CURSOR) + "\n"

    def draw(self, text: str) -> None:
        self.written += text

    def screen(self) -> list[str]:
        """The lines that are visible: a carriage return, and what erases a line, obeyed."""
        lines = []
        for raw in self.written.split("\n"):
            line = ""
            for part in raw.split("\r"):
                column = 0
                for index, text in enumerate(part.split("\x1b[K")):
                    line = line[:column] if index else line
                    line = line[:column] + text + line[column + len(text) :]
                    column += len(text)
            lines.append(re.sub(r"  +", " ", BEFORE.sub("", line)))
        return lines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Terminal:
    monkeypatch.setenv("COLUMNS", "120")
    found = Terminal()
    monkeypatch.setattr(logs, "draw", found.draw)
    return found


def lines_on(terminal: Terminal, style: Style | None = CURSOR) -> StartupLines:
    return StartupLines(terminal, style)  # type: ignore[arg-type]


def note(percent: int) -> str:
    return f"reading weights {percent}%: 0.54 of 1.19 GB, 1.30 GB/s"


def test_a_terminal_shows_one_line_that_grows(terminal: Terminal) -> None:
    lines = lines_on(terminal)
    lines.phase("worker 0", Phase.LOADING, "checking the checkpoint")
    for percent in (0, 45, 100):
        lines.phase("worker 0", Phase.LOADING, note(percent))
        bar = terminal.screen()[-1]
        assert bar.startswith("worker 0 reading weights [")
        assert f"{percent}% 0.54 of 1.19 GB, 1.30 GB/s" in bar
        raw = terminal.written.rpartition("[=" if percent else "[>")[2].partition("]")[0]
        assert len(raw) + 1 == progress.BAR_WIDTH
        done = raw.count("=") + bool(percent)
        assert abs(done / progress.BAR_WIDTH - percent / 100) < 0.05
    assert len(terminal.screen()) == 2


def test_the_bar_is_gone_when_the_weights_are_there(terminal: Terminal) -> None:
    lines = lines_on(terminal)
    lines.phase("worker 0", Phase.LOADING, note(50))
    lines.phase("tokenizer 0", Phase.READY, "")
    assert terminal.screen()[0] == "tokenizer 0 ready"
    assert "50%" in terminal.screen()[1]
    lines.phase("worker 0", Phase.LOADING, "measuring a step")
    lines.phase("worker 0", Phase.READY, "1.19 GB of weights in 0.9 s, 1.30 GB/s")
    assert terminal.screen() == [
        "tokenizer 0 ready",
        "worker 0 measuring a step",
        "worker 0 ready (1.19 GB of weights in 0.9 s, 1.30 GB/s)",
        "",
    ]


def test_several_workers_share_the_line(terminal: Terminal) -> None:
    lines = lines_on(terminal)
    lines.phase("worker 0", Phase.LOADING, note(80))
    lines.phase("worker 1", Phase.LOADING, note(40))
    assert terminal.screen()[-1].endswith("] 40% worker 0 80%, worker 1 40%")
    lines.phase("worker 0", Phase.READY, "")
    assert terminal.screen()[0] == "worker 0 ready"
    assert "worker 1 reading weights" in terminal.screen()[1]


@pytest.mark.parametrize("columns", [20, 60, 80])
def test_a_narrow_terminal_is_not_overrun(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines_on(terminal).phase("worker 0", Phase.LOADING, note(80))
    drawn = terminal.written.replace("\x1b[K", "").removesuffix("\r")
    assert len(drawn) < max(columns, len("00:00:00.000  info   worker 0     "))


def test_an_error_finds_a_clean_line(terminal: Terminal) -> None:
    lines = lines_on(terminal)
    lines.phase("worker 0", Phase.LOADING, note(80))
    lines.clear()
    assert terminal.screen() == [""]


def test_elsewhere_a_line_follows_after_ten_percent_and_two_seconds(
    terminal: Terminal, clock: Clock
) -> None:
    lines = lines_on(terminal, None)
    for percent in range(101):  # 20 seconds
        lines.phase("worker 0", Phase.LOADING, note(percent))
        clock(0.2)
    said = terminal.screen()[:-1]
    assert [line.partition("weights ")[2].partition("%")[0] for line in said] == [
        str(percent) for percent in range(0, 101, 10)
    ]
    terminal.written = ""
    for percent in range(100):  # two seconds
        lines.phase("worker 1", Phase.LOADING, note(percent))
        clock(0.02)
    for _ in range(100):  # a disk that hangs
        lines.phase("worker 1", Phase.LOADING, note(99))
        clock(0.02)
    assert len(terminal.screen()[:-1]) == 2
    assert "\r" not in terminal.written
