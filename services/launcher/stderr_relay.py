"""What a child prints goes to the launcher's standard error; its last words are remembered."""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable

import msgspec

_STDERR = 2
_KEPT_LINES = 20
_LONGEST_LINE = 64 * 1024
_END_SECONDS = 0.5
_FAREWELL = b"penstock: "
"""How a process begins the line that says why it cannot go on."""


class StderrRelay(threading.Thread):
    """Copies a pipe to standard error, whole lines at a time, until the pipe ends.

    A thread for each child: when nobody reads the launcher's standard error, this thread blocks
    and not the launcher; the child's own log writer then drops lines.

    A farewell is held back: the launcher says it, together with whose it is, and nobody reads the
    same words twice.
    """

    def __init__(
        self, label: str, pipe: int, render: Callable[[bytes, str], bytes] | None = None
    ) -> None:
        """``render``: what is shown of a line and its process; ``None``: the line as it is."""
        super().__init__(name=f"stderr of {label}", daemon=True)
        self._label = label
        self._render = render
        self._pipe = pipe
        self._lines: deque[bytes] = deque(maxlen=_KEPT_LINES)
        self._farewell: list[bytes] = []
        """Lines held back until it is certain that they are the last ones."""

    def run(self) -> None:
        rest = b""
        while chunk := os.read(self._pipe, 65536):
            whole, newline, rest = (rest + chunk).rpartition(b"\n")
            if len(rest) > _LONGEST_LINE:
                whole, newline, rest = whole + newline + rest, b"\n", b""
            self._copy(whole + newline)
        self._copy(rest + b"\n" if rest else b"")
        os.close(self._pipe)

    def _copy(self, lines: bytes) -> None:
        """Pass on whole lines, except for those of a farewell at the end."""
        said = []
        for line in lines.splitlines(keepends=True):
            if line.startswith(_FAREWELL) and len(self._farewell) < _KEPT_LINES:
                self._farewell.append(line)
            else:
                said += [*self._farewell, line]
                self._farewell.clear()
        self._lines.extend(line for line in lines.splitlines() if line.strip())
        if self._render is not None:
            said = [self._render(line, self._label) for line in said if line.strip()]
        self._write(b"".join(said))

    def _write(self, lines: bytes) -> None:
        try:
            while lines:
                lines = lines[os.write(_STDERR, lines) :]
        except OSError:
            pass  # a full disk or a closed terminal costs log lines, nothing else

    def farewell(self) -> str:
        """What was held back, once the process has ended; empty where it said no farewell."""
        self.join(_END_SECONDS)  # a grandchild may hold the pipe open
        lines = (line.removeprefix(_FAREWELL) for line in self._farewell)
        return b"".join(lines).decode("utf-8", "replace").strip()

    def last_words(self) -> str:
        """The farewell, or else the last line; of a log line, what happened."""
        if words := self.farewell():
            return words
        if not self._lines:
            return ""
        line = self._lines[-1].decode("utf-8", "replace").strip()
        try:
            record = msgspec.json.decode(line)
        except (msgspec.DecodeError, RecursionError):
            return line
        if isinstance(record, dict):
            return str(record.get("event", line))
        return line
