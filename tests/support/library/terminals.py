"""A terminal in the place of this process's standard error."""

from __future__ import annotations

import contextlib
import fcntl
import os
import pty
import struct
import sys
import termios
import threading
from collections.abc import Iterator
from unittest import mock

import pyte


class Screen:
    """What stands there; complete once the block has ended."""

    def __init__(self, columns: int) -> None:
        self._screen = pyte.Screen(columns, 24)
        self._stream = pyte.ByteStream(self._screen)

    def feed(self, data: bytes) -> None:
        self._stream.feed(data)

    @property
    def lines(self) -> list[str]:
        return [line.rstrip() for line in self._screen.display if line.strip()]


@contextlib.contextmanager
def terminal_as_stderr(columns: int = 80) -> Iterator[Screen]:
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    screen = Screen(columns)

    def read() -> None:
        with contextlib.suppress(OSError):  # nobody holds the other side any more
            while data := os.read(ours, 4096):
                screen.feed(data)

    reader = threading.Thread(target=read)
    reader.start()
    try:
        with open(theirs, "w") as stream, mock.patch.object(sys, "stderr", stream):
            yield screen
    finally:
        reader.join(60)
        os.close(ours)
