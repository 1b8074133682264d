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
        """The last line of each process: its text without numbers, percent, and its time."""
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


class AnnouncedModel(msgspec.Struct, frozen=True, kw_only=True):
    """What it tells of one model."""

    model: str
    folder: str
    dtype: str
    stored_dtype: str
    """Of the weights in the folder."""
    max_model_len: int
    """Tokens of prompt and output together; 0: nobody has said so."""
    kv_tokens: int
    """Tokens that the KV memory of all its engines holds."""
    chat: bool
    """The model has a chat template."""


class Announcement(msgspec.Struct, frozen=True, kw_only=True):
    """What a server that is ready tells of itself."""

    url: str
    """The address of the page, below which is the API in ``/v1``; or of a UNIX socket."""
    models: list[AnnouncedModel]
    device: str
    router: str
    seconds: float
    """From the command to being ready."""
    drain_timeout_s: float
    keys: bool
    """Clients need an API key."""
    grpc: str = ""
    """The address of gRPC; empty: it is not served."""

    @property
    def socket(self) -> str:
        """The path of the UNIX socket that HTTP is on; empty: it is on a port."""
        return self.url.removeprefix("unix:") if self.url.startswith("unix:") else ""


def announce(server: Announcement, *, people: bool, style: Style) -> None:
    """Print on standard output where the server is."""
    logs.flush()  # what was said before stands above it
    _print(block(server, style) if people else json_line(server))


def _type(model: AnnouncedModel, style: Style) -> str:
    if model.stored_dtype in ("", model.dtype):
        return model.dtype
    return f"{model.dtype}  {style.dim(f'(config.json says {model.stored_dtype}; see --dtype)')}"


def block(server: Announcement, style: Style) -> str:
    """For people: the page first, then all that a client needs, and a command that works."""
    device = ("Device", server.device)
    if server.socket:
        rows = [("API", f"{style.bold(server.url)}  {style.dim('(/v1/…)')}")]
    else:
        rows = [("Page", style.bold(f"{server.url}/")), ("API", f"{server.url}/v1")]
    rows += [("gRPC", server.grpc)] if server.grpc else []
    for model in server.models:
        rows.append(("Model", f"{model.model}  {style.dim(model.folder)}"))
        rows += [device] if len(server.models) == 1 else []
        rows += [("Type", _type(model, style)), ("Context", _context(model))]
    rows += [device] if len(server.models) > 1 else []
    rows.append(("Router", f"{server.router}  {style.dim('(--router, for more processes)')}"))
    lines = ["", style.bold(f"Penstock is ready after {server.seconds:.1f} s."), ""]
    lines += [f"  {style.dim(f'{name:8}')} {text}" for name, text in rows]
    key = "  (first: export PENSTOCK_API_KEY=…, one of the keys)" if server.keys else ""
    lines += ["", f"Try it{key}:", ""]
    lines += [f"  {curl(server)}", ""]
    lines += [
        f"Ctrl-C stops: running requests have {server.drain_timeout_s:g} s to finish; "
        "a second Ctrl-C ends at once.",
        "",
    ]
    return "\n".join(lines)


def _context(model: AnnouncedModel) -> str:
    if not model.max_model_len:
        return "known when it is awake"
    return f"{model.max_model_len:,} tokens; KV memory holds {model.kv_tokens:,}"


def json_line(server: Announcement) -> str:
    """For programs: one object, with the fields of a log line. One model is told in fields of its
    own, several as ``models``."""
    now = datetime.datetime.now(datetime.UTC)
    models = [
        {key: value for key, value in msgspec.structs.asdict(one).items() if key != "chat"}
        for one in server.models
    ]
    told: dict[str, object] = {"url": server.url}
    told |= {"grpc": server.grpc} if server.grpc else {}
    told |= models[0] if len(models) == 1 else {"models": models}
    told |= {name: getattr(server, name) for name in ("device", "router", "seconds")}
    return json.dumps(
        {
            "event": "serving",
            "level": "info",
            "service": "launcher",
            "timestamp": now.isoformat().replace("+00:00", "Z"),
            "api": server.url if server.socket else f"{server.url}/v1",
            **told,
            "drain_timeout_s": server.drain_timeout_s,
        }
    )


def _bar(percent: int, width: int) -> str:
    done = width * percent // 100
    return "=" * done + ">" * (done < width) + " " * (width - done - 1)


def curl(server: Announcement) -> str:
    """A shell command that asks the server for a completion."""
    model = server.models[0]
    body: dict[str, object] = {"model": model.model}
    if model.chat:
        path, body["messages"] = "chat/completions", [{"role": "user", "content": "Hello!"}]
    else:
        path, body["prompt"] = "completions", "Hello"
    body["max_tokens"] = 32
    key = '-H "Authorization: Bearer $PENSTOCK_API_KEY" ' if server.keys else ""
    text = shlex.quote(json.dumps(body, ensure_ascii=False))
    url = server.url
    if server.socket:
        url = f"--unix-socket {shlex.quote(server.socket)} http://localhost"
    return f"curl {url}/v1/{path} {key}-H 'Content-Type: application/json' -d {text}"


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
