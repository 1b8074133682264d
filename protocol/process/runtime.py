"""What every process does the same way: open a mailbox, join, beat, drain, leave.

A service on an event loop derives from ``AsyncService``; one with a loop of its own (scheduler,
worker) derives from ``LoopService``. Both call ``on_message`` for each message that is not about
the membership, ``on_gone`` when peers are gone, and ``on_tick`` a few times a second.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Callable

import msgspec

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.process import logs
from penstock.protocol.process.faults import Faults
from penstock.protocol.process.large_blocks import give_back_large_blocks
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import BeatThread, Ended, Participant
from penstock.protocol.process.trace import TRACE
from penstock.protocol.wire.advertised_address import find_own_address
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import AddressError, Mailbox
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase, Trace
from penstock.protocol.wire.security import CurveKeys

_encode = msgspec.msgpack.Encoder().encode
TICK_SECONDS = 0.25
TURN_SECONDS = 0.001
"""A loop handles messages for so long before it does its work: a burst must not hold up the work
that its first messages bring."""


class _EndNow(BaseException):
    """A signal that asks for the end at once; no handler of mere errors may take it."""


def _unheard(complaint: str) -> None:
    """For whom nobody reads."""


def open_mailbox(
    cluster: ClusterConfig,
    service: str,
    *,
    watch: bool = False,
    complain: Callable[[str], None] = _unheard,
) -> Mailbox:
    """The inbox of a service: on ipc beside the router's, on tcp where told or found out.

    While the router's name does not resolve it waits and says so to ``complain``. Raises
    ``AddressError`` and ``SecurityError``.
    """
    keys = CurveKeys(cluster.secret) if cluster.secret else None
    ports = _port_range(cluster.port_range) if cluster.port_range else None
    own = find_own_address(cluster, service, complain)
    return Mailbox(
        own.bind,
        name=service,
        advertise=own.advertise,
        ports=ports,
        keys=keys,
        watch_disconnects=watch,
    )


def _port_range(text: str) -> tuple[int, int]:
    low, _, high = text.partition("-")
    if not (low.isdecimal() and high.isdecimal() and 0 < int(low) <= int(high) < 65536):
        raise AddressError(f"--port-range {text!r}: expected FIRST-LAST, both from 1 to 65535")
    return int(low), int(high)


class Service:
    """The common part: mailbox, membership, beats, signals."""

    name = ""
    fatal: tuple[type[Exception], ...] = (Ended,)
    """Errors that end the process wherever they come up: its state may be wrong after them."""

    def __init__(self, config: Config, *, watch_disconnects: bool = False) -> None:
        self.config = config
        self.log = logs.set_up(
            self.name, config.observability.log_level, config.observability.log_format
        )
        self.faults = Faults(config.test.fault, self.name)
        self.mailbox = open_mailbox(
            config.cluster, self.name, watch=watch_disconnects, complain=self.log.warning
        )
        if self.faults:
            self.mailbox.faults = self.faults
        self.participant = Participant(
            self.name, self.mailbox, config.cluster.router, self.identity()
        )
        self.participant.on_change = self._on_change
        self.status = self.participant.status
        self.beats = BeatThread(self.participant, self.mailbox)
        self.exit_code = 0
        self._signals = 0
        self._beaten_to = 0
        """Incarnation of the router that was last told of this process's phase at once."""

    def identity(self) -> Identity:
        return Identity(os.getpid(), socket.gethostname())

    def set_phase(self, phase: str, note: str = "") -> None:
        """Tell the others where this process stands, at once. Nothing follows on draining."""
        if self.status.phase == Phase.DRAINING:
            return
        self.status.phase = phase
        self.status.note = note
        self.beats.now()

    def report(self, metrics: Registry) -> None:
        """Hand the newest counters to the beats."""
        metrics.set("outbox_bytes", self.mailbox.outbox_bytes())
        metrics.counter("malformed_frames_total").value = float(self.mailbox.malformed)
        self.status.metrics = _encode(metrics.report())

    def _on_change(self, gone: dict[int, Peer]) -> None:
        if self._beaten_to != self.participant.router_incarnation:
            self._beaten_to = self.participant.router_incarnation
            self.beats.now()
        self.on_gone(gone, time.monotonic())

    def _dispatch(self, sender: int, message: Message, now: float) -> None:
        """One message; a fault in handling it is logged and costs nobody else anything, unless it
        is ``fatal``."""
        began = time.monotonic_ns() if TRACE.on else 0
        try:
            self.handle(sender, message, now)
        except self.fatal:
            raise
        except Exception:
            self.log.exception("message failed", kind=type(message).__name__)
        if began:
            TRACE.add_message(message, began)

    def handle(self, sender: int, message: Message, now: float) -> None:
        """The membership's messages first; what a lost peer still sends is dropped there."""
        if self.participant.handle(sender, message, now):
            return
        if isinstance(message, Trace):
            if refusal := TRACE.ask(message, now):
                self.mailbox.send(message.reply_to, refusal)
        else:
            self.on_message(sender, message, now)

    def _send_trace(self, now: float) -> None:
        """The next piece of a recording that is over, if its observer is still there."""
        observer = TRACE.observer
        if (piece := TRACE.next_piece(now)) is None:
            return
        if any(peer.address == observer for peer in self.participant.peers.values()):
            self.mailbox.send(observer, piece)
        else:
            TRACE.drop()

    def _tick(self) -> None:
        now = time.monotonic()
        for refusal in self.mailbox.complaints():
            self.log.error(refusal)
            self.participant.explained()
        complaint = self.participant.tick(now)
        if complaint:
            self.log.warning(complaint)
        if TRACE.observer:
            self._send_trace(now)
        try:
            self.on_tick(now)
        except self.fatal:
            raise
        except Exception:
            self.log.exception("tick failed")

    def _ended(self, cause: Ended) -> None:
        self.log.error(str(cause))
        self.exit_code = 5

    # --- for the service to define

    def on_message(self, sender: int, message: Message, now: float) -> None: ...

    def on_gone(self, gone: dict[int, Peer], now: float) -> None: ...

    def on_tick(self, now: float) -> None: ...

    def on_drain(self) -> None:
        """SIGTERM: take no new work; ``drained`` says when the old work is done.

        Load and note that it sets are what the others hear first of the draining.
        """

    def drained(self) -> bool:
        return True


class AsyncService(Service):
    """A service on an asyncio (uvloop) event loop."""

    loop: asyncio.AbstractEventLoop

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
            self.mailbox.close()
            logs.flush()
        return self.exit_code

    async def _main(self) -> None:
        self.loop = asyncio.get_running_loop()
        self._finished = asyncio.Event()
        self._draining_since: float | None = None
        self._planned_flush: asyncio.TimerHandle | None = None
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
        if self.mailbox.flush():
            return
        due = self.loop.time() + self.mailbox.retry_s()
        planned = self._planned_flush
        if planned is not None:
            if planned.when() <= due:
                return
            planned.cancel()  # one that waits since long must not delay a new one
        self._planned_flush = self.loop.call_at(due, self._flush_later)

    def _flush_later(self) -> None:
        self._planned_flush = None
        self.flush()

    def _on_timer(self) -> None:
        if self._finished.is_set():
            return
        self.loop.call_later(TICK_SECONDS, self._on_timer)
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
            self.mailbox.close()
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
