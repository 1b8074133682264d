"""What ``penstock serve`` tells its user on standard output."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

from penstock.protocol.messages.membership import Phase

REPEAT_SECONDS = 2.0
REPEAT_PERCENT = 10
"""Where no bar can be drawn, a line on the reading of weights follows another after so many
seconds and percent more."""
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6
_READING = re.compile(r"reading weights (\d+) ?%(?:: (.*))?")
_ERASE_LINE = "\r\x1b[K"


class StartupLines:
    """One line for each phase of start-up, with the seconds since the start.

    On a terminal the reading of weights is one line that is drawn again and again. It ends with a
    carriage return, so that whatever else is printed begins at the margin.
    """

    def __init__(self, began: float) -> None:
        self.began = began
        self._terminal = sys.stdout.isatty()
        self._shown: dict[str, tuple[str, int, float]] = {}
        """Of each process the last line: what it says, without numbers; percent; when."""
        self._bars: dict[str, tuple[int, str]] = {}
        """Who reads weights now: percent, and the rest of the note."""

    def say(self, text: str) -> None:
        self.clear()
        _print(f"{time.monotonic() - self.began:6.2f} s  {text}")
        self._draw()

    def clear(self) -> None:
        """Take the bar away, before something else is printed."""
        if self._bars and self._terminal:
            _print(_ERASE_LINE, end="")

    def phase(self, label: str, phase: str, note: str) -> None:
        """A process is in ``phase``; says so when that is news."""
        if phase == Phase.STARTING:
            return
        if label.startswith("scheduler") and phase == Phase.LOADING:
            return  # it waits for its worker, which has a line of its own
        reading = _READING.fullmatch(note) if phase == Phase.LOADING else None
        if reading is not None and self._terminal:
            self._bars[label] = int(reading[1]), reading[2] or ""
            self._draw()
            return
        if label in self._bars:
            self.clear()
            del self._bars[label]
            self._draw()
        if phase == Phase.READY:
            text = f"{label} ready ({note})" if note else f"{label} ready"
        else:
            text = f"{label}: {note or phase}"
        self._say_once(label, text, int(reading[1]) if reading is not None else -1)

    def _say_once(self, label: str, text: str, percent: int) -> None:
        """``percent``: -1 for what does not count up, which is said once."""
        stem = "reading" if percent >= 0 else re.sub(r"[\d.]+", "", text)
        now = time.monotonic()
        shown, last, at = self._shown.get(label, ("", -1, 0.0))
        grown = percent >= last + REPEAT_PERCENT and now - at >= REPEAT_SECONDS
        if stem == shown and not (percent >= 0 and grown):
            return
        self._shown[label] = stem, percent, now
        self.say(text)

    def _draw(self) -> None:
        if not (self._bars and self._terminal):
            return
        percent = min(percent for percent, _ in self._bars.values())
        before = f"{time.monotonic() - self.began:6.2f} s  "
        if len(self._bars) == 1:
            ((label, (_, rest)),) = self._bars.items()
            before, after = f"{before}{label}: reading weights [", f"] {percent:3}%  {rest}"
        else:
            each = ", ".join(f"{label} {done}%" for label, (done, _) in self._bars.items())
            before, after = f"{before}reading weights [", f"] {each}"
        columns = shutil.get_terminal_size().columns - 1
        width = min(BAR_WIDTH, max(MIN_BAR_WIDTH, columns - len(before) - len(after)))
        line = before + _bar(percent, width) + after
        _print(f"{_ERASE_LINE}{line[:columns]}\r", end="")

    def serving(self, model: str, url: str, *, chat: bool, keys: bool, router: str) -> None:
        """The server is ready: where it is, and a command that works."""
        seconds = time.monotonic() - self.began
        _print(f"\nPenstock serves {model} at {url}/v1 after {seconds:.1f} s. Try:\n")
        _print(f"  {curl(model, url, chat=chat, keys=keys)}\n")
        _print(f"More processes join with --router {router}")
        _print("Ctrl-C stops: running requests are finished first; a second one ends at once.")


def _bar(percent: int, width: int) -> str:
    done = width * percent // 100
    return "=" * done + ">" * (done < width) + " " * (width - done - 1)


def curl(model: str, url: str, *, chat: bool, keys: bool) -> str:
    """A shell command that asks the server for a completion."""
    body: dict[str, object] = {"model": model}
    if chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Hello"
    body["max_tokens"] = 32
    key = '-H "Authorization: Bearer $API_KEY" ' if keys else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d {text}"


def has_chat_template(folder: Path) -> bool:
    """Whether the model's folder brings a chat template, in any of the places for it."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


def _print(text: str, end: str = "\n") -> None:
    try:
        print(text, end=end, flush=True)
    except OSError:  # nobody reads any more: no reason to stop serving
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
