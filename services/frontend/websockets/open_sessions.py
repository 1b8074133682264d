"""The WebSockets that are open in a process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class OpenSession(Protocol):
    """A WebSocket."""

    def drain(self) -> None:
        """Begin nothing new, and close when nothing runs."""


class OpenSessions:
    def __init__(self) -> None:
        self._open: dict[OpenSession, None] = {}

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def entered(self, session: OpenSession) -> Iterator[None]:
        """It is open for the time of the block."""
        self._open[session] = None
        try:
            yield
        finally:
            del self._open[session]

    def drain(self) -> None:
        """The server goes down: WebSockets close as soon as nothing runs on them."""
        for session in list(self._open):
            session.drain()
