"""What every process does the same way: open a mailbox, join, beat, drain, leave.

A service on an event loop derives from ``AsyncService`` (``async_service.py``); one with a loop of
its own (scheduler, worker) derives from ``LoopService`` (``loop_service.py``). Both call
``on_message`` for each message that is not about the membership, ``on_gone`` when peers are gone,
and ``on_tick`` a few times a second.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from penstock.protocol.config import ClusterConfig, Config
from penstock.protocol.process import logs
from penstock.protocol.process.faults import Faults
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import BeatThread, Ended, Participant
from penstock.protocol.process.process_metrics import ProcessMetrics
from penstock.protocol.process.spans import SPANS
from penstock.protocol.process.state_file import StateFile
from penstock.protocol.process.trace import TRACE
from penstock.protocol.wire.addresses import AddressError
from penstock.protocol.wire.advertised_address import find_own_address
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.administration import LOG_LEVEL, Ask, Told
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase, Trace
from penstock.protocol.wire.security import CurveKeys

TICK_SECONDS = 0.25


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
    ports = port_range(cluster.port_range) if cluster.port_range else None
    own = find_own_address(cluster, service, complain)
    return Mailbox(
        own.bind,
        name=service,
        advertise=own.advertise,
        ports=ports,
        keys=keys,
        watch_disconnects=watch,
    )


def port_range(text: str) -> tuple[int, int]:
    """``FIRST-LAST``. Raises ``AddressError``."""
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
        if config.observability.otel_traces:
            self._begin_spans()
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
        self._state_file = StateFile(config.process.state_file, self.status.phase)
        self.beats = BeatThread(self.participant, self.mailbox)
        self.exit_code = 0
        self._signals = 0
        self._started_at = time.time()
        self._reported: ProcessMetrics | None = None
        self._beaten_to = 0
        """Incarnation of the router that was last told of this process's phase at once."""

    def _begin_spans(self) -> None:
        try:
            SPANS.begin(self.name)
        except (ImportError, ValueError) as error:
            self.log.error(f"no traces: {error}; see docs/traces.md")

    def identity(self) -> Identity:
        return Identity(os.getpid(), socket.gethostname())

    def set_phase(self, phase: str, note: str = "") -> None:
        """Tell the others where this process stands, at once. Nothing follows on draining."""
        if self.status.phase == Phase.DRAINING:
            return
        self.status.phase = phase
        self.status.note = note
        self.beats.now()
        self._state_file.tell(phase, time.monotonic())

    def report(self, metrics: Registry) -> None:
        """Beats tell the values of these series from now on. For the loop's thread, each tick."""
        if self._reported is None:
            metrics.set("process_start_time_seconds", self._started_at)
            self._reported = ProcessMetrics(metrics, self.mailbox, self.name)
            self.participant.measured = self._reported.encoded
        self._reported.tick()

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
        if isinstance(message, Ask) and message.what == LOG_LEVEL:
            self._change_log_level(message)
        elif isinstance(message, Trace):
            if refusal := TRACE.ask(message, now):
                self.mailbox.send(message.reply_to, refusal)
        else:
            self.on_message(sender, message, now)

    def _change_log_level(self, asked: Ask) -> None:
        level = asked.about.decode(errors="replace")
        if logs.change_level(level):
            self.log.info("the log's level was changed", level_now=level)
        self.mailbox.send(asked.reply_to, Told(asked.number, level.encode()))

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
        self._state_file.tell(self.status.phase, now)
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
