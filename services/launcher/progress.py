"""What ``penstock serve`` tells its user while it starts: a line for each phase, then where it is.

The lines are log lines like those of all other processes. Only the announcement goes to standard
output: a block for people on a terminal, one JSON object for programs.
"""

from __future__ import annotations

import datetime
import json
import re
import shlex
import shutil
import sys
import time
from pathlib import Path

import msgspec

from penstock.protocol.config.terminal import Style
from penstock.protocol.process import logs
from penstock.protocol.process.console import ERASE_REST, head
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.wire.messages.membership import Phase

REPEAT_SECONDS = 2.0
REPEAT_PERCENT = 10
"""Where no bar can be drawn, a line on the reading of weights follows another after so many
seconds and percent more."""
BAR_WIDTH, MIN_BAR_WIDTH = 24, 6
_READING = re.compile(r"reading weights (\d+) ?%(?:: (.*))?")
_COLUMNS_BEFORE = len("00:00:00.000  level  ") + len("process 000") + len("  ")


class StartupLines:
    """One line for each phase of start-up.

    On a terminal the reading of weights is one line that is drawn again and again. It ends with a
    carriage return, so that whatever else is printed begins at the margin; every line of a log
    erases what it does not cover.
    """

    def __init__(self, log: Logger, style: Style | None = None) -> None:
        """``style``: of the terminal that a bar is drawn on; ``None``: nothing is drawn."""
        self._log = log
        self._style = style
        self._shown: dict[str, tuple[str, int, float]] = {}
        """Of each process the last line: what it says, without numbers; percent; when."""
        self._bars: dict[str, tuple[int, str]] = {}
        """Who reads weights now: percent, and the rest of the note."""
        self._drawn = ""

    def say(self, text: str, process: str = "launcher") -> None:
        self._log.info(text, process=process)
        self._drawn = ""
        self._draw()

    def clear(self) -> None:
        """Take the bar away, before something else is printed."""
        if self._bars and self._style is not None:
            logs.draw(ERASE_REST)

    def phase(self, label: str, phase: str, note: str) -> None:
        """A process is in ``phase``; says so when that is news."""
        if phase == Phase.STARTING:
            return
        if label.startswith("scheduler") and phase == Phase.LOADING:
            return  # it waits for its worker, which has a line of its own
        reading = _READING.fullmatch(note) if phase == Phase.LOADING else None
        if reading is not None and self._style is not None:
            self._bars[label] = int(reading[1]), reading[2] or ""
            self._draw()
            return
        if label in self._bars:
            self.clear()
            del self._bars[label]
        if phase == Phase.READY:
            text = f"ready ({note})" if note else "ready"
        else:
            text = note or phase
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
        self.say(text, label)

    def _draw(self) -> None:
        if not self._bars or self._style is None:
            return
        percent = min(percent for percent, _ in self._bars.values())
        if len(self._bars) == 1:
            ((label, (_, rest)),) = self._bars.items()
        else:
            label = "workers"
            rest = ", ".join(f"{one} {done}%" for one, (done, _) in self._bars.items())
        before, after = "reading weights [", f"] {percent:3}%  {rest}"
        columns = shutil.get_terminal_size().columns - 1 - _COLUMNS_BEFORE
        width = min(BAR_WIDTH, max(MIN_BAR_WIDTH, columns - len(before) - len(after)))
        line = (before + _bar(percent, width) + after)[: max(0, columns)]
        if line != self._drawn:
            self._drawn = line
            logs.draw(f"{head('info', label, self._style)}{line}{ERASE_REST}\r")


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a server that is ready tells of itself."""

    url: str
    """Of the page; ``/v1`` below it is the API."""
    model: str
    folder: str
    device: str
    dtype: str
    max_model_len: int
    """Tokens of prompt and output together; 0: nobody has said so."""
    kv_tokens: int
    """Tokens that the KV memory of all engines holds."""
    router: str
    seconds: float
    """From the command to being ready."""
    drain_timeout_s: float
    chat: bool
    """The model has a chat template."""
    keys: bool
    """Clients need an API key."""


def announce(server: Announcement, *, people: bool, style: Style) -> None:
    """Print on standard output where the server is."""
    logs.flush()  # what was said before stands above it
    _print(block(server, style) if people else json_line(server))


def block(server: Announcement, style: Style) -> str:
    """For people: the page first, then all that a client needs, and a command that works."""
    context = f"{server.max_model_len:,} tokens" if server.max_model_len else "unknown"
    rows = {
        "Page": style.bold(f"{server.url}/"),
        "API": f"{server.url}/v1",
        "Model": f"{server.model}  {style.dim(server.folder)}",
        "Device": server.device,
        "Type": server.dtype,
        "Context": f"{context}; KV memory holds {server.kv_tokens:,}",
        "Router": f"{server.router}  {style.dim('(--router, for more processes)')}",
    }
    lines = ["", style.bold(f"Penstock is ready after {server.seconds:.1f} s."), ""]
    lines += [f"  {style.dim(f'{name:8}')} {text}" for name, text in rows.items()]
    key = "  (first: export PENSTOCK_API_KEY=…, one of the keys)" if server.keys else ""
    lines += ["", f"Try it{key}:", ""]
    lines += [f"  {curl(server)}", ""]
    lines += [
        f"Ctrl-C stops: running requests have {server.drain_timeout_s:g} s to finish; "
        "a second Ctrl-C ends at once.",
        "",
    ]
    return "\n".join(lines)


def json_line(server: Announcement) -> str:
    """For programs: one object, with the fields of a log line."""
    now = datetime.datetime.now(datetime.UTC)
    fields = msgspec.structs.asdict(server)
    return json.dumps(
        {
            "event": "serving",
            "level": "info",
            "service": "launcher",
            "timestamp": now.isoformat().replace("+00:00", "Z"),
            "api": f"{server.url}/v1",
            **{name: fields[name] for name in fields if name not in ("chat", "keys")},
        }
    )


def _bar(percent: int, width: int) -> str:
    done = width * percent // 100
    return "=" * done + ">" * (done < width) + " " * (width - done - 1)


def curl(server: Announcement) -> str:
    """A shell command that asks the server for a completion."""
    body: dict[str, object] = {"model": server.model}
    if server.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Hello"
    body["max_tokens"] = 32
    key = '-H "Authorization: Bearer $PENSTOCK_API_KEY" ' if server.keys else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    return f"curl {server.url}/v1/{path} {key}-H 'Content-Type: application/json' -d {text}"


def has_chat_template(folder: Path) -> bool:
    """Whether the model's folder brings a chat template, in any of the places for it."""
    if any((folder / name).exists() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    try:
        return b'"chat_template"' in (folder / "tokenizer_config.json").read_bytes()
    except OSError:
        return False


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except OSError:  # nobody reads any more: no reason to stop serving
        sys.stdout = open("/dev/null", "w")  # noqa: SIM115
