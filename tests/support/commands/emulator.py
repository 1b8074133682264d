"""A command on a terminal: a pseudo-terminal, and an emulator that obeys what is written to it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyte

WAIT_S = 45.0


class _Screen(pyte.HistoryScreen):
    """Answers questions for the cursor's place, as terminals do."""

    def __init__(self, columns: int, rows: int, answer: Callable[[str], None]) -> None:
        self._answer = answer
        super().__init__(columns, rows, history=1000, ratio=0.5)

    def write_process_input(self, data: str) -> None:
        self._answer(data)


class Terminal:
    """A running command, and what its user sees."""

    def __init__(
        self,
        command: list[str],
        environment: dict[str, str],
        columns: int,
        rows: int,
        folder: Path | None = None,
    ) -> None:
        self._ours, theirs = pty.openpty()
        self._changed = threading.Condition()
        self._screen = _Screen(columns, rows, self.type)
        self._stream = pyte.ByteStream(self._screen)
        self.raw = b""
        """All that was written to the terminal."""
        self._set_size(columns, rows)
        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment,
            preexec_fn=_take_terminal, cwd=folder,
        )  # fmt: skip
        os.close(theirs)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _set_size(self, columns: int, rows: int) -> None:
        fcntl.ioctl(self._ours, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))

    def _read(self) -> None:
        while True:
            try:
                data = os.read(self._ours, 65536)
            except OSError:  # nobody holds the other side any more
                data = b""
            with self._changed:
                if data:
                    self.raw += data
                    self._stream.feed(data)
                self._changed.notify_all()
            if not data:
                return

    def type(self, text: str) -> None:
        """Keys; ``\\r`` is Enter, ``\\x03`` Ctrl-C."""
        os.write(self._ours, text.encode())

    def resize(self, columns: int, rows: int) -> None:
        with self._changed:
            self._screen.resize(rows, columns)
            self._set_size(columns, rows)

    @property
    def lines(self) -> list[str]:
        """The screen without what is blank at its end."""
        lines = [line.rstrip() for line in self._screen.display]
        while lines and not lines[-1]:
            lines.pop()
        return lines

    @property
    def text(self) -> str:
        """What has left the screen at its top, and the screen."""
        above = [
            "".join(line[x].data for x in range(self._screen.columns)).rstrip()
            for line in self._screen.history.top
        ]
        return "\n".join([*above, *self.lines])

    def style(self, word: str) -> pyte.screens.Char:
        """The first character of a word on the screen, with its colours."""
        for row, line in enumerate(self._screen.display):
            if word in line:
                return self._screen.buffer[row][line.index(word)]
        raise AssertionError(f"{word!r} is not on the screen:\n{self.text}")

    def until(self, condition: Callable[[], bool], what: str = "") -> None:
        with self._changed:
            if not self._changed.wait_for(condition, WAIT_S):
                raise AssertionError(f"never {what}; the terminal shows:\n{self.text}")

    def sees(self, text: str, times: int = 1) -> None:
        """Wait until a text is there so many times at least."""
        self.until(lambda: self.text.count(text) >= times, f"showed {text!r} {times} times")

    def at_prompt(self, prompt: str = ">") -> None:
        """Wait until the next line may be typed."""
        self.until(lambda: bool(self.lines) and self.lines[-1] == prompt, f"had a prompt {prompt}")

    def ended(self) -> int:
        """Wait for the command's end; its exit code."""
        code = self.process.wait(WAIT_S)
        self._reader.join(WAIT_S)
        return code

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._reader.join(5)
        os.close(self._ours)


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)
    # As a shell does for a command in the foreground. Tests that were started in the background
    # ignore SIGINT, and a process hands that on to its children.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@contextlib.contextmanager
def terminal_of(
    command: list[str],
    *,
    environment: dict[str, str],
    columns: int = 80,
    rows: int = 24,
    folder: Path | None = None,
    kind: str = "xterm-256color",
) -> Iterator[Terminal]:
    """Run a command on a terminal for a block. ``kind``: what it is told that the terminal is."""
    told = {"TERM": kind, "COLORTERM": "", "NO_COLOR": "", "COLUMNS": "", "LINES": ""}
    chosen = {name: value for name, value in (environment | told).items() if value}
    found = Terminal(command, chosen, columns, rows, folder)
    try:
        yield found
    finally:
        found.close()


@contextlib.contextmanager
def terminal(*arguments: str, environment: dict[str, str], **more: Any) -> Iterator[Terminal]:
    """Run ``penstock`` on a terminal for a block. ``more``: as ``terminal_of`` takes it."""
    command = [sys.executable, "-m", "penstock.services", *arguments]
    with terminal_of(command, environment=environment, **more) as found:
        yield found
