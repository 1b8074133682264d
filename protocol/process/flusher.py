"""Sends what waits in the outboxes of a mailbox that lives on an asyncio event loop."""

from __future__ import annotations

import asyncio

from penstock.protocol.wire.mailbox import Mailbox


class Flusher:
    def __init__(self, loop: asyncio.AbstractEventLoop, mailbox: Mailbox) -> None:
        self._loop = loop
        self._mailbox = mailbox
        self._planned: asyncio.Handle | None = None
        self._due = 0.0
        """When that is. A uvloop gives no ``TimerHandle`` for what is due within half a
        millisecond."""

    def flush(self) -> None:
        """Send what waits, now or in a moment."""
        if self._mailbox.flush():
            return
        due = self._loop.time() + self._mailbox.retry_s()
        if self._planned is not None:
            if self._due <= due:
                return
            self._planned.cancel()  # one that waits since long must not delay a new one
        self._due = due
        self._planned = self._loop.call_at(due, self._flush_later)

    def _flush_later(self) -> None:
        self._planned = None
        self.flush()

    def stop(self) -> None:
        """Before the mailbox is closed."""
        if self._planned is not None:
            self._planned.cancel()
            self._planned = None
