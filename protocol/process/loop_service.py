"""A service with a loop of its own: scheduler, worker."""

from __future__ import annotations

import signal
import time

from penstock.protocol.config import Config
from penstock.protocol.process import logs
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.service import TICK_SECONDS, Service
from penstock.protocol.process.spans import SPANS
from penstock.protocol.wire.messages.membership import Phase

TURN_SECONDS = 0.001
"""A loop handles messages for so long before it does its work: a burst must not hold up the work
that its first messages bring."""


class _EndNow(BaseException):
    """A signal that asks for the end at once; no handler of mere errors may take it."""


class LoopService(Service):
    """A service with a plain loop: wait for messages, handle them, do the work."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self._running = False
        self._ending = False
        self._draining_since: float | None = None
        self._next_tick = 0.0

    def run(self) -> int:
        """Run until drained. Returns the exit code."""
        self.beats.start()
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, self._on_signal)
            self.start()
            self._running = True
            while self._running:
                self._turn()
        except Ended as cause:
            self._ended(cause)
        except _EndNow:
            self.log.info("ends at once, as told")
        except self.fatal as cause:
            self.log.exception(f"{cause}; the process ends, and another one takes its work over")
            self.exit_code = 1
        finally:
            self._ending = True
            self.stop()
            self.participant.goodbye()
            self.beats.stop()
            self._state_file.remove()
            self.mailbox.close()
            SPANS.end()
            logs.flush()
        return self.exit_code

    def start(self) -> None:
        """Called once before the loop."""

    def stop(self) -> None:
        """Called once after the loop."""

    def _turn(self) -> None:
        now = time.monotonic()
        if self._signals and self._draining_since is None:
            self._begin_drain(now)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._tick()
            self._check_drain(now)
        timeout = self._next_tick - now
        if not self.mailbox.flush():
            timeout = min(timeout, self.mailbox.retry_s())
        if self.mailbox.wait(min(timeout, self.patience(now))):
            self.pump()
        self.work(time.monotonic())

    def pump(self) -> None:
        """Handle what is in the inbox, or what ``TURN_SECONDS`` suffice for."""
        now = time.monotonic()
        self.status.begin(self.status.item_limit)
        for sender, message in self.mailbox.drain():
            self._dispatch(sender, message, now)
            if time.monotonic() - now > TURN_SECONDS:
                break
        self.status.done()

    def patience(self, now: float) -> float:
        """Seconds that the loop may sleep."""
        return TICK_SECONDS

    def work(self, now: float) -> None:
        """What there is to do after the messages of a turn."""

    def _check_drain(self, now: float) -> None:
        if self._draining_since is None:
            return
        if self.drained() or now - self._draining_since > self.config.launch.drain_timeout_s:
            self._running = False

    def _begin_drain(self, now: float) -> None:
        self._draining_since = now
        self._next_tick = now
        self.status.note = ""
        self.on_drain()
        self.set_phase(Phase.DRAINING, self.status.note)

    def _on_signal(self, *_: object) -> None:
        """Runs between any two instructions of the main thread: it leaves the draining to it."""
        self._signals += 1
        if not self._ending and (self._signals == 2 or not self._running):
            raise _EndNow
