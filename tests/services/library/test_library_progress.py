"""The bar that says how far a call of the library is."""

from __future__ import annotations

import io
import sys

import pytest
from support.library.terminals import terminal_as_stderr

from penstock.services.library.progress import ProgressBar


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("columns", "shown"),
    [
        (
            100,
            "[======>                 ] 500/2,000 prompts, 600 in and 100 out tokens/s, 0:30 left",
        ),
        (80, "[====>              ] 500/2,000 prompts, 600 in and 100 out tokens/s, 0:30 left"),
        (62, "500/2,000 prompts, 600 in and 100 out tokens/s, 0:30 left"),
        (40, "500/2,000 prompts, 600 in and 100 out t"),
    ],
)
def test_a_bar_fills_in_one_line_of_the_terminal(columns: int, shown: str) -> None:
    clock = Clock()
    with terminal_as_stderr(columns) as screen, ProgressBar(2000, clock=clock) as bar:
        bar.finished(20, 1, 1)  # at once after the first look: not drawn
        clock.now += 10.0
        bar.finished(480, 5999, 999)
    assert screen.lines == [shown]


def test_what_is_left_is_not_told_before_anything_has_ended_and_at_the_end_the_whole_is() -> None:
    clock = Clock()
    with terminal_as_stderr() as screen:
        with ProgressBar(3, clock=clock), pytest.raises(KeyError), ProgressBar(3, clock=clock):
            raise KeyError
        with ProgressBar(3, clock=clock) as bar:
            clock.now += 3723.0
            bar.finished(3, 3723, 7446)
        print("afterwards", file=sys.stderr)
    nothing = "[>                       ] 0/3 prompts, 0 in and 0 out tokens/s, -:-- left"
    whole = "[========================] 3/3 prompts, 1 in and 2 out tokens/s, in 1:02:03"
    assert screen.lines == [nothing, nothing, whole, "afterwards"]


def test_nothing_is_written_where_nobody_asked_and_no_terminal_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def written(total: int, shown: bool | None) -> str:
        monkeypatch.setattr(sys, "stderr", stream := io.StringIO())
        with ProgressBar(total, shown) as bar:
            bar.finished(total, 1, 1)
        return stream.getvalue()

    assert written(2, None) == written(2, False) == written(0, True) == ""
    assert "] 2/2 prompts, " in written(2, True)
    with terminal_as_stderr() as screen, ProgressBar(2, False) as bar:
        bar.finished(2, 1, 1)
    assert screen.lines == []


@pytest.mark.parametrize("stream", [None, io.StringIO()], ids=["none", "closed"])
def test_a_call_goes_on_without_a_stream_for_its_bar(
    stream: io.StringIO | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if stream is not None:
        stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    for shown in (None, True):
        with ProgressBar(2, shown) as bar:
            bar.finished(2, 1, 1)
