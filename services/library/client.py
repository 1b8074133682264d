"""A member of the pipeline whose messages the caller's thread takes."""

from __future__ import annotations

import threading
import time

from penstock.protocol.process.service import TICK_SECONDS
from penstock.services.library.member import Member


class PipelineClient(Member):
    """One thread at a time may use it (``lock``); while nobody does, a thread of its own keeps the
    membership up to date."""

    def __init__(self, router: str) -> None:
        """Raises ``TimeoutError`` when the router does not answer."""
        self.lock = threading.RLock()
        self._closed = threading.Event()
        super().__init__(router)
        self._next_tick = 0.0
        while not self.has_joined():
            self.pump(0.05)
        self._keeper = threading.Thread(target=self._keep, name="penstock", daemon=True)
        self._keeper.start()

    def pump(self, seconds: float) -> None:
        """Wait up to ``seconds`` for messages and handle them. Raises ``Ended`` when fenced."""
        timeout = min(seconds, TICK_SECONDS)
        if not self._mailbox.flush():
            timeout = min(timeout, self._mailbox.retry_s())
        if self._mailbox.wait(timeout):
            self.take_messages()
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self.tick(now)

    def _keep(self) -> None:
        while not self._closed.wait(TICK_SECONDS):
            if self.lock.acquire(blocking=False):
                try:
                    self.pump(0.0)
                finally:
                    self.lock.release()

    def close(self) -> None:
        """Leave the pipeline; open requests are cancelled."""
        self._closed.set()
        with self.lock:
            self.leave()
