"""A bar on standard error that says how far a call is."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

REFRESH_SECONDS = 0.2
BAR_WIDTH = 24
LEAST_WIDTH = 6
"""A narrower bar says nothing, and is left out."""
COLUMNS = 80
"""Where no terminal says how many it has."""


class ProgressBar:
    """Counts prompts that have ended and the tokens of these; drawn five times a second at most.

    ``shown``: by default where standard error is a terminal. ``clock``: seconds.
    """

    def __init__(
        self, total: int, shown: bool | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total = total
        self._shown = total > 0 and (_on_terminal() if shown is None else shown)
        self._clock = clock
        self._done = self._read = self._written = 0
        self._began = clock()
        self._drawn_at = 0.0
        self._length = 0
        """Of what stands there."""

    def finished(self, prompts: int, read: int, written: int) -> None:
        """So many prompts more, of so many tokens, with answers of so many tokens."""
        self._done += prompts
        self._read += read
        self._written += written
        self.refresh()

    def refresh(self) -> None:
        """Show the time that has gone by, and what has ended meanwhile."""
        if self._shown and self._clock() - self._drawn_at >= REFRESH_SECONDS:
            self._draw()

    def _draw(self, end: str = "") -> None:
        self._drawn_at = now = self._clock()
        text = self._text(now - self._began, _columns() - 1)
        blanks = " " * (self._length - len(text))
        self._length = len(text)
        try:
            sys.stderr.write(f"\r{text}{blanks}{end}")
            sys.stderr.flush()
        except (AttributeError, OSError, ValueError):
            self._shown = False  # there is no stream any more; the answers need none

    def _text(self, seconds: float, columns: int) -> str:
        done, total = self._done, self._total
        if done == total:
            left = f"in {_duration(seconds)}"
        else:
            left = f"{_duration(seconds / done * (total - done))} left" if done else "-:-- left"
        rates = [round(tokens / max(seconds, 1e-9)) for tokens in (self._read, self._written)]
        said = f"{done:,}/{total:,} prompts, {rates[0]:,} in and {rates[1]:,} out tokens/s, {left}"
        width = min(BAR_WIDTH, columns - len(said) - 3)
        if width < LEAST_WIDTH:
            return said[:columns]
        return f"[{_bar(done * width // total, width)}] {said}"

    def __enter__(self) -> Self:
        if self._shown:
            self._draw()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._shown:
            self._draw("\n")


def _bar(done: int, width: int) -> str:
    return "=" * done + ">" * (done < width) + " " * (width - done - 1)


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _on_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # there is none, or it was closed
        return False


def _columns() -> int:
    """Of the terminal; a notebook's stream has no descriptor, and a pipe no width."""
    try:
        return os.get_terminal_size(sys.stderr.fileno()).columns or COLUMNS
    except (OSError, ValueError, AttributeError):
        return COLUMNS
