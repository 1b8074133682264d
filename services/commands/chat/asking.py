"""One question to the server: its answer is shown as it comes, and Ctrl-C ends it."""

from __future__ import annotations

import contextlib
import queue
import signal
import sys
import termios
import threading
from collections.abc import Iterator
from typing import Any

from penstock.services.commands.api_client import ApiClient
from penstock.services.commands.chat.answer import Answer
from penstock.services.commands.chat.views import View

_RESIZED = object()
_END = object()


def ask(client: ApiClient, body: dict[str, Any], view: View, asked: str) -> Answer:
    """Ask and show. An answer that Ctrl-C has ended says so, and the server has cancelled it.

    asked: the words of the question, for a screen that is drawn anew. Raises ``CommandError`` for
    a failure before the answer's end, and ``KeyboardInterrupt`` for a second Ctrl-C before it.
    """
    answer = Answer()
    # Signal handlers may put into it.
    items: queue.SimpleQueue[Any] = queue.SimpleQueue()
    reader = threading.Thread(target=_read, args=(client, body, items), daemon=True)
    view.begin(asked)
    failure: Exception | None = None
    with _signals(client, answer, items), _no_echo():
        reader.start()
        while (item := _next(items, view)) is not _END:
            if item is _RESIZED:
                view.resized()
            elif isinstance(item, Exception):
                failure = item
            elif not answer.interrupted:
                for kind, text in answer.take(item):
                    view.piece(kind, text)
        reader.join()
        view.end(answer)
    if failure is not None and not answer.interrupted:
        raise failure
    return answer


def _next(items: queue.SimpleQueue[Any], view: View) -> Any:
    while True:
        try:
            return items.get(timeout=view.due())
        except queue.Empty:
            view.draw()


def _read(client: ApiClient, body: dict[str, Any], items: queue.SimpleQueue[Any]) -> None:
    """The thread that waits for the server."""
    try:
        for chunk in client.stream("/v1/chat/completions", body):
            items.put(chunk)
    except Exception as error:
        items.put(error)
    finally:
        items.put(_END)


@contextlib.contextmanager
def _signals(client: ApiClient, answer: Answer, items: queue.SimpleQueue[Any]) -> Iterator[None]:
    def interrupt(*_: Any) -> None:
        if answer.interrupted:
            raise KeyboardInterrupt
        answer.interrupted = True
        client.interrupt()

    former = {
        signal.SIGINT: signal.signal(signal.SIGINT, interrupt),
        signal.SIGWINCH: signal.signal(signal.SIGWINCH, lambda *_: items.put(_RESIZED)),
    }
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)


@contextlib.contextmanager
def _no_echo() -> Iterator[None]:
    """What is typed meanwhile is for the next question, and not shown in the middle of this
    answer."""
    try:
        descriptor = sys.stdin.fileno()
        former = termios.tcgetattr(descriptor)
    except (termios.error, OSError, ValueError):
        yield  # no terminal
        return
    changed = termios.tcgetattr(descriptor)
    changed[3] &= ~termios.ECHO
    termios.tcsetattr(descriptor, termios.TCSADRAIN, changed)
    try:
        yield
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, former)
