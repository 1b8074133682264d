"""Structured logs that never block a process.

Lines go through a bounded queue to a thread that writes to standard error. A reader that does not
read, or a full disk, costs log lines (counted, and said so in the next line), not requests:
measured, an unread stderr pipe froze a whole event loop.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec

from penstock.protocol.config.terminal import is_terminal, style_of
from penstock.protocol.process.console import record_line
from penstock.protocol.process.plain_structlog import Logger, structlog

MAX_QUEUED_LINES = 4096
_LINES_A_WRITE = 64
_PAUSE_S = 0.05
_MAX_TEXT = 2000
_BOUND = ("id", "trace")
"""What stands in a line about a request."""
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Writer(threading.Thread):
    """Writes queued lines to a file descriptor.

    What comes within ``_PAUSE_S`` of a line is written at once: to wake a thread costs more than
    to make a line, and so does a call of the system.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="log writer", daemon=True)
        self.tell_dropped: Callable[[int], str] = "({} log lines dropped)".format
        self._descriptor = descriptor
        self._lines = deque[bytes]()
        self._wake, self._writing = threading.Event(), threading.Lock()
        self._dropped = 0

    def put(self, line: bytes) -> None:
        """Any thread may. It does not wait. ``line`` with its newline."""
        if len(self._lines) >= MAX_QUEUED_LINES:
            self._dropped += 1
            return
        self._lines.append(line)
        if not self._wake.is_set():
            self._wake.set()

    def run(self) -> None:
        while self._wake.wait():
            self._wake.clear()  # before the look at what there is: what comes later sets it again
            self._write_waiting()
            time.sleep(_PAUSE_S)

    def _write_waiting(self) -> None:
        with self._writing:
            while self._lines:
                lines = [
                    self._lines.popleft() for _ in range(min(_LINES_A_WRITE, len(self._lines)))
                ]
                dropped, self._dropped = self._dropped, 0
                told = [_line(self.tell_dropped(dropped))] if dropped else []
                try:
                    self._write(b"".join(told + lines))
                except OSError:
                    self._dropped += len(lines) + dropped

    def _write(self, data: bytes) -> None:
        """All of ``data``, however little the descriptor takes at once."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                select.select([], [self._descriptor], [])

    def flush(self, seconds: float = 1.0) -> None:
        """Write what waits, but do not wait for ever."""
        done = threading.Thread(target=self._write_waiting, daemon=True)
        done.start()
        done.join(seconds)


def _line(text: str) -> bytes:
    return f"{text}\n".encode("utf-8", "backslashreplace")


_writer: _Writer | None = None
_encode = msgspec.json.Encoder().encode
_record: Callable[[str, str, dict[str, Any]], None] = lambda level, event, fields: None  # noqa: E731
"""Writes one line of this process; nothing before ``set_up``."""
_least = 100
"""The number of the least level that is logged."""


_set_up: tuple[str, str] | None = None
"""Service and form that the log was set up for."""


class _Lines:
    """What structlog writes its finished lines to."""

    def __init__(self, writer: _Writer) -> None:
        self._put = writer.put

    def msg(self, line: str) -> None:
        self._put(_line(line))

    log = debug = info = warning = warn = error = critical = exception = fatal = failure = msg


def _bounded(_: Any, __: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    """No value may flood the log. Of a traceback the end is kept: it says what happened."""
    for key, value in event.items():
        if value is None or isinstance(value, int | float):
            continue
        text = value if isinstance(value, str) else repr(value)
        if len(text) > _MAX_TEXT:
            cut = "…" + text[-_MAX_TEXT:] if key == "exception" else text[:_MAX_TEXT] + "…"
            event[key] = cut
    return event


def for_people(form: str) -> bool:
    """Whether ``--log-format`` means lines for people: ``auto`` does on a terminal."""
    return form == "console" or (form == "auto" and is_terminal(2))


def set_up(service: str, level: str, form: str) -> Logger:
    """Configure structlog for this process and return its logger.

    ``form``: ``json`` (one object a line), ``console``, or ``auto``.
    """
    global _set_up, _writer, _record, _least
    _set_up, _least = (service, form), _LEVELS[level]
    if _writer is None:
        _writer = _Writer(2)
        _writer.start()
    if for_people(form):
        style = style_of(2)

        def renderer(_: Any, __: str, event: structlog.typing.EventDict) -> str:
            return record_line(event, style)

        _writer.tell_dropped = "({} log lines dropped)".format
    else:
        renderer = structlog.processors.JSONRenderer()  # type: ignore[assignment]
        _writer.tell_dropped = (
            '{{"event": "log lines dropped", "level": "warning", "lines": {}}}'.format
        )
    writer = _writer
    _record = _recorder(service, writer.put, renderer)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _bounded,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: _Lines(writer),
        cache_logger_on_first_use=False,
    )
    # Libraries' own warnings (aiohttp, asyncio) take the same road.
    logging.basicConfig(handlers=[_Handler()], level=logging.WARNING, force=True)
    logger: Logger = structlog.get_logger(service=service, pid=os.getpid())
    return logger


def change_level(level: str) -> bool:
    """Log from this level on; returns whether there is such a level."""
    if level not in _LEVELS or _set_up is None:
        return False
    set_up(_set_up[0], level, _set_up[1])
    return True


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = max(10, min(50, record.levelno // 10 * 10))
            logger = structlog.get_logger(library=record.name)
            # What our own code gives as ``extra``; see ``trace_context.line_fields``.
            given = {name: getattr(record, name, "") for name in _BOUND}
            bound = {name: value for name, value in given.items() if value}
            logger.log(level, record.getMessage(), exc_info=record.exc_info, **bound)
        except Exception:  # a library's malformed record must not end its caller
            structlog.get_logger(library=record.name).error("unreadable log record")


def _recorder(
    service: str, put: Callable[[bytes], None], render: Callable[..., str]
) -> Callable[[str, str, dict[str, Any]], None]:
    pid, as_json = os.getpid(), isinstance(render, structlog.processors.JSONRenderer)

    def write(level: str, event: str, fields: dict[str, Any]) -> None:
        line = {**fields, "service": service, "pid": pid, "event": event, "level": level}
        now = datetime.now(UTC)
        if as_json:
            line["timestamp"] = now  # written as in a logger's lines
            put(_encode(line) + b"\n")
        else:
            line["timestamp"] = now.isoformat()
            put(_line(render(None, level, line)))

    return write


def wants(level: str) -> bool:
    """Whether lines of this level are logged, for who would gather their fields in vain."""
    return _LEVELS[level] >= _least


def record(level: str, event: str, fields: dict[str, Any]) -> None:
    """Log short values that JSON knows, for what happens with every request: a fifth of the cost
    of a logger's line."""
    if wants(level):
        _record(level, event, fields)


def draw(text: str) -> None:
    """Put text between the log lines as it is, without a newline: a line that is drawn again."""
    if _writer is not None:
        _writer.put(text.encode("utf-8", "backslashreplace"))


def flush() -> None:
    """Let the last lines out before the process ends."""
    if _writer is not None:
        _writer.flush()
