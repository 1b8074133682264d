"""Structured logs that never block a process.

Lines go through a bounded queue to a thread that writes to standard error. A reader that does not
read, or a full disk, costs log lines (counted, and said so in the next line), not requests:
measured, an unread stderr pipe froze a whole event loop.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from penstock.protocol.config.terminal import is_terminal, style_of
from penstock.protocol.console import record_line
from penstock.protocol.plain_structlog import Logger, structlog

MAX_QUEUED_LINES = 4096
_MAX_TEXT = 2000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40}


class _Writer(threading.Thread):
    """Writes queued lines to a file descriptor."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(name="log writer", daemon=True)
        self.tell_dropped: Callable[[int], str] = "({} log lines dropped)".format
        self._descriptor = descriptor
        self._lines: queue.Queue[str] = queue.Queue(MAX_QUEUED_LINES)
        self._dropped = 0

    def put(self, line: str, end: str = "\n") -> None:
        try:
            self._lines.put_nowait(line + end)
        except queue.Full:
            self._dropped += 1

    def run(self) -> None:
        while True:
            line = self._lines.get()
            dropped, self._dropped = self._dropped, 0
            if dropped:
                line = f"{self.tell_dropped(dropped)}\n{line}"
            try:
                self._write(line.encode("utf-8", "backslashreplace"))
            except OSError:
                self._dropped += dropped + 1
            self._lines.task_done()

    def _write(self, data: bytes) -> None:
        """All of ``data``, however little the descriptor takes at once."""
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:  # another process made the descriptor non-blocking
                select.select([], [self._descriptor], [])

    def flush(self, seconds: float = 1.0) -> None:
        """Wait until the queue is written, but not for ever."""
        done = threading.Thread(target=self._lines.join, daemon=True)
        done.start()
        done.join(seconds)


_writer: _Writer | None = None


class _Lines:
    """What structlog writes its finished lines to."""

    def __init__(self, writer: _Writer) -> None:
        self._put = writer.put

    def msg(self, line: str) -> None:
        self._put(line)

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
    global _writer
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


class _Handler(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        try:
            level = max(10, min(50, record.levelno // 10 * 10))
            logger = structlog.get_logger(library=record.name)
            logger.log(level, record.getMessage(), exc_info=record.exc_info)
        except Exception:  # a library's malformed record must not end its caller
            structlog.get_logger(library=record.name).error("unreadable log record")


def draw(text: str) -> None:
    """Put text between the log lines as it is, without a newline: a line that is drawn again."""
    if _writer is not None:
        _writer.put(text, end="")


def flush() -> None:
    """Let the last lines out before the process ends."""
    if _writer is not None:
        _writer.flush()
