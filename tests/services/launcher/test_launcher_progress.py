"""What a user sees while weights are read: a bar on a terminal, few lines elsewhere."""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable

import pytest

from penstock.protocol.messages.membership import Phase
from penstock.services.launcher import progress
from penstock.services.launcher.progress import StartupLines

Clock = Callable[[float], None]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True

    def screen(self) -> list[str]:
        """The lines that are visible: a carriage return, and what erases a line, obeyed."""
        lines = []
        for raw in self.getvalue().split("\n"):
            line = ""
            for part in raw.split("\r"):
                if part.startswith("\x1b[K"):
                    line = part.removeprefix("\x1b[K")
                else:
                    line = part + line[len(part) :]
            lines.append(line.partition(" s  ")[2] or line)
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
    monkeypatch.setenv("COLUMNS", "100")
    return Terminal()


def on_terminal(test: Callable[[Terminal], None]) -> Callable[[Terminal], None]:
    """What the test prints goes to its terminal."""

    def redirected(terminal: Terminal) -> None:
        with contextlib.redirect_stdout(terminal):
            test(terminal)

    redirected.__name__ = test.__name__
    return redirected


def note(percent: int) -> str:
    return f"reading weights {percent}%: 0.54 of 1.19 GB, 1.30 GB/s"


@on_terminal
def test_a_terminal_shows_one_line_that_grows(terminal: Terminal) -> None:
    lines = StartupLines(100.0)
    lines.phase("worker 0", Phase.LOADING, "checking the checkpoint")
    for percent in (0, 45, 100):
        lines.phase("worker 0", Phase.LOADING, note(percent))
        bar = terminal.screen()[-1]
        assert bar.startswith("worker 0: reading weights [")
        assert f"{percent}%  0.54 of 1.19 GB, 1.30 GB/s" in bar
        inside = bar.partition("[")[2].partition("]")[0]
        assert len(inside) == progress.BAR_WIDTH
        assert abs(inside.count("=") / progress.BAR_WIDTH - percent / 100) < 0.05
    assert len(terminal.screen()) == 2


@on_terminal
def test_the_bar_is_gone_when_the_weights_are_there(terminal: Terminal) -> None:
    lines = StartupLines(100.0)
    lines.phase("worker 0", Phase.LOADING, note(50))
    lines.phase("tokenizer 0", Phase.READY, "")
    assert terminal.screen()[0] == "tokenizer 0 ready"
    assert "50%" in terminal.screen()[1]
    lines.phase("worker 0", Phase.LOADING, "measuring a step")
    lines.phase("worker 0", Phase.READY, "1.19 GB of weights in 0.9 s, 1.30 GB/s")
    assert terminal.screen() == [
        "tokenizer 0 ready",
        "worker 0: measuring a step",
        "worker 0 ready (1.19 GB of weights in 0.9 s, 1.30 GB/s)",
        "",
    ]


@on_terminal
def test_several_workers_share_the_line(terminal: Terminal) -> None:
    lines = StartupLines(100.0)
    lines.phase("worker 0", Phase.LOADING, note(80))
    lines.phase("worker 1", Phase.LOADING, note(40))
    assert terminal.screen()[-1].endswith("] worker 0 80%, worker 1 40%")
    lines.phase("worker 0", Phase.READY, "")
    assert terminal.screen()[0] == "worker 0 ready"
    assert "worker 1: reading weights" in terminal.screen()[1]


def test_a_narrow_terminal_is_not_overrun(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    with contextlib.redirect_stdout(terminal):
        StartupLines(100.0).phase("worker 0", Phase.LOADING, note(80))
    assert max(map(len, terminal.getvalue().removeprefix("\r\x1b[K").split("\r"))) < 40


def test_the_bar_makes_room_for_the_numbers_on_eighty_columns(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with contextlib.redirect_stdout(terminal):
        StartupLines(100.0).phase("worker 0", Phase.LOADING, note(80))
    assert terminal.screen() == [
        "worker 0: reading weights [======> ]  80%  0.54 of 1.19 GB, 1.30 GB/s"
    ]


@on_terminal
def test_an_error_finds_a_clean_line(terminal: Terminal) -> None:
    lines = StartupLines(100.0)
    lines.phase("worker 0", Phase.LOADING, note(80))
    lines.clear()
    assert terminal.screen() == [""]


def test_a_pipe_gets_a_line_after_ten_percent_and_two_seconds(
    capsys: pytest.CaptureFixture[str], clock: Clock
) -> None:
    lines = StartupLines(100.0)
    for percent in range(101):  # 20 seconds
        lines.phase("worker 0", Phase.LOADING, note(percent))
        clock(0.2)
    said = capsys.readouterr().out.splitlines()
    assert [line.partition("weights ")[2].partition("%")[0] for line in said] == [
        str(percent) for percent in range(0, 101, 10)
    ]
    for percent in range(100):  # two seconds
        lines.phase("worker 1", Phase.LOADING, note(percent))
        clock(0.02)
    for _ in range(100):  # a disk that hangs
        lines.phase("worker 1", Phase.LOADING, note(99))
        clock(0.02)
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 2
    assert "\r" not in "".join(said)
