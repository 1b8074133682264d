"""Log lines for people: one format for all processes of a server on a terminal.

``08:12:01.903  info   worker 0     importing torch  key=value``: the local time, the level, the
process, the event, and what belongs to it. Processes write JSON lines into their pipes; the
launcher renders those as it does its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import msgspec

from penstock.protocol.config.terminal import Style

ERASE_REST = "\x1b[K"
_LEVELS = {
    "debug": ("debug", "\x1b[2m"),
    "info": ("info", "\x1b[32m"),
    "warning": ("warn", "\x1b[1;33m"),
    "error": ("error", "\x1b[1;31m"),
    "critical": ("fatal", "\x1b[1;31m"),
}
_PROCESS_COLOUR = "\x1b[36m"
_PROCESS_WIDTH = 11
_NOT_FIELDS = frozenset({"timestamp", "level", "event", "service", "process", "pid", "exception"})


def record_line(record: Mapping[str, Any], style: Style, process: str = "") -> str:
    """A log record as one line, with its traceback below it; no newline at the end.

    ``process``: who wrote it, where the record does not say it well enough.
    """
    named = record.get("process") or record.get("service") or record.get("library") or ""
    who = process or _printable(str(named))
    pairs = [
        f"{style.dim(_printable(key) + '=')}{_shown(value)}"
        for key, value in record.items()
        if key not in _NOT_FIELDS
    ]
    text = "  ".join([_printable(str(record.get("event", ""))), " ".join(pairs)]).rstrip()
    line = head(str(record.get("level", "")), who, style, _clock(record.get("timestamp"))) + text
    if trace := record.get("exception"):
        line += "".join(f"\n    {_printable(row)}" for row in str(trace).splitlines())
    if style.cursor:
        line = line.replace("\n", f"{ERASE_REST}\n") + ERASE_REST
    return line


def head(level: str, process: str, style: Style, clock: str = "") -> str:
    """What every line begins with. ``clock``: the time of day; empty for now."""
    name, colour = _LEVELS.get(level, (_printable(level)[:5], ""))
    shown_level = style.paint(colour, name) + " " * (5 - len(name))
    shown_process = style.paint(_PROCESS_COLOUR, process) + " " * (_PROCESS_WIDTH - len(process))
    return f"{style.dim(clock or _clock(None))}  {shown_level}  {shown_process}  "


def rendered(line: bytes, process: str, style: Style) -> bytes:
    """A line from a process's standard error: a JSON record, or whatever a library printed."""
    try:
        record = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        record = None
    if not isinstance(record, dict) or "event" not in record:
        record = {"event": line.decode("utf-8", "replace").rstrip("\r\n")}
    return record_line(record, style, process).encode("utf-8", "backslashreplace") + b"\n"


def _clock(timestamp: Any) -> str:
    """The local time of day of an ISO timestamp, or now."""
    try:
        when = datetime.fromisoformat(timestamp).astimezone()
    except (TypeError, ValueError):
        when = datetime.now()
    return f"{when:%H:%M:%S}.{when.microsecond // 1000:03}"


def _shown(value: Any) -> str:
    if isinstance(value, str):
        plain = value and value.isprintable() and not any(char in value for char in " \"'=")
        return value if plain else repr(value)
    return _printable(str(value))


def _printable(text: str) -> str:
    """Nothing that a client wrote may move the cursor, colour the screen or begin a line."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode() for char in text
    )
