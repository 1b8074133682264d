"""A member of the pipeline on an asyncio event loop."""

from __future__ import annotations

import asyncio
import contextlib
import time
import weakref
from collections.abc import Callable

from penstock.protocol.process.flusher import Flusher
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.service import TICK_SECONDS
from penstock.protocol.wire.messages.requests import Work
from penstock.services.library.member import Member, Submission


class AsyncPipelineClient(Member):
    """Belongs to the event loop in which it was made, and to its thread."""

    def __init__(self, router: str, on_tick: weakref.WeakMethod[Callable[[], None]]) -> None:
        """on_tick: called a few times a second, and when this process is fenced."""
        super().__init__(router)
        self.loop = asyncio.get_running_loop()
        self.fenced: Ended | None = None
        """Why nothing will come any more."""
        self._on_tick = on_tick
        self._flusher = Flusher(self.loop, self._mailbox)
        self._closed = False
        self.loop.add_reader(self._mailbox.fd, self._drain)
        self._timer: asyncio.Handle = self.loop.call_soon(self._tick)

    def submit(
        self,
        work: Work,
        name: str = "",
        wake: Callable[[], None] | None = None,
        *,
        called: float | None = None,
    ) -> Submission:
        submission = super().submit(work, name, wake, called=called)
        self._flusher.flush()
        return submission

    def cancel(self, submission: Submission) -> None:
        """Nobody waits for it any more; idempotent."""
        if not self._closed:
            self.ledger.cancel(submission.id)
            self._flusher.flush()

    def _drain(self) -> None:
        """Take what is in the inbox; the descriptor is edge triggered, so never stop early."""
        if self._closed or self.fenced is not None:
            return
        before = self._mailbox.received
        try:
            self.take_messages()
        except Ended as cause:
            self.fenced = cause
            self._call_back()
            return
        if self._mailbox.received != before:
            self.loop.call_soon(self._drain)
        self._flusher.flush()

    def _tick(self) -> None:
        if self._closed:
            return
        self._timer = self.loop.call_later(TICK_SECONDS, self._tick)
        self.tick(time.monotonic())
        self._drain()
        self._call_back()

    def _call_back(self) -> None:
        on_tick = self._on_tick()
        if on_tick is not None:
            on_tick()

    def leave(self) -> None:
        """Leave the pipeline; open requests are cancelled. From any thread; idempotent."""
        if self._closed:
            return
        if self.loop.is_running() and self.loop is not _running_loop():
            with contextlib.suppress(RuntimeError):  # it has ended just now
                self.loop.call_soon_threadsafe(self.leave)
                return
        self._closed = True
        self._timer.cancel()
        self._flusher.stop()
        if not self.loop.is_closed():
            self.loop.remove_reader(self._mailbox.fd)
        super().leave()


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
