"""A service on an asyncio (uvloop) event loop: router, tokenizer, frontend."""

from __future__ import annotations

import asyncio
import signal
import time

from penstock.protocol.process import logs
from penstock.protocol.process.flusher import Flusher
from penstock.protocol.process.large_blocks import give_back_large_blocks
from penstock.protocol.process.participant import Ended
from penstock.protocol.process.service import TICK_SECONDS, Service
from penstock.protocol.process.spans import SPANS
from penstock.protocol.wire.messages.membership import Phase


class AsyncService(Service):
    """A service on an asyncio (uvloop) event loop."""

    loop: asyncio.AbstractEventLoop
    loop_delay = 0.0
    """Seconds by which the last tick came late: so long, what came then waited for the loop."""

    async def start(self) -> None:
        """Opens what the service needs; it is ready when this returns."""

    async def stop(self) -> None:
        """Closes it again."""

    def run(self) -> int:
        """Run until drained. Returns the exit code."""
        import uvloop

        give_back_large_blocks()
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                runner.run(self._main())
        finally:
            self._state_file.remove()
            self.mailbox.close()
            SPANS.end()
            logs.flush()
        return self.exit_code

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._tick_due = self.loop.time()
        self._draining_since: float | None = None
        self._flusher = Flusher(self.loop, self.mailbox)
        for number in (signal.SIGTERM, signal.SIGINT):
            self.loop.add_signal_handler(number, self._on_signal)
        self.loop.add_reader(self.mailbox.fd, self._drain)
        strangers = self.mailbox.strangers
        if strangers is not None:
            self.loop.add_reader(strangers.fd, strangers.read)
        self.beats.start()
        self._on_timer()
        try:
            await self._start_or_end()
            self._drain()
            await self._finished.wait()
        finally:
            await self.stop()
            self.loop.remove_reader(self.mailbox.fd)
            if strangers is not None:
                self.loop.remove_reader(strangers.fd)
            self.participant.goodbye()
            self.beats.stop()

    async def _start_or_end(self) -> None:
        """Start; but a process that is told to end while it starts does so at once."""
        starting = asyncio.create_task(self.start())
        ending = asyncio.create_task(self._finished.wait())
        await asyncio.wait({starting, ending}, return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        if not starting.done():
            starting.cancel()
            await asyncio.wait({starting})
        if not starting.cancelled():
            starting.result()

    def _drain(self) -> None:
        """Take what is in the inbox; the descriptor is edge triggered, so never stop early."""
        if self._finished.is_set():
            return
        status = self.status
        status.begin()
        now = time.monotonic()
        before = self.mailbox.received
        try:
            for sender, message in self.mailbox.drain():
                self._dispatch(sender, message, now)
        except Ended as cause:
            self._ended(cause)
            self._finished.set()
            return
        if self.mailbox.received != before:  # malformed and dropped ones count as well
            self.loop.call_soon(self._drain)
            self.after_messages(now)
        status.done()
        self.flush()

    def after_messages(self, now: float) -> None:
        """All messages of one turn are handled."""

    def flush(self) -> None:
        """Send what waits in the outboxes, now or in a moment."""
        self._flusher.flush()

    def _on_timer(self) -> None:
        if self._finished.is_set():
            return
        self.loop_delay = max(0.0, self.loop.time() - self._tick_due)
        self._tick_due = self.loop.time() + TICK_SECONDS
        self.loop.call_at(self._tick_due, self._on_timer)
        self._tick()
        self._drain()
        if self._draining_since is not None:
            waited = time.monotonic() - self._draining_since
            if self.drained() or waited > self.config.launch.drain_timeout_s:
                self._finished.set()

    def _on_signal(self) -> None:
        self._signals += 1
        if self._signals > 1:
            self._finished.set()
            return
        self._draining_since = time.monotonic()
        self.status.note = ""
        self.on_drain()
        self.set_phase(Phase.DRAINING, self.status.note)
        if self.drained():
            self._finished.set()
