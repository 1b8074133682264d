"""The library's place in the pipeline: a mailbox, a membership, the ledger of open requests."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import msgspec

from penstock.client.ledger import ClientLedger, OpenRequest
from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.service import TICK_SECONDS, open_mailbox
from penstock.protocol.wire.messages.membership import Identity, Phase
from penstock.protocol.wire.messages.requests import Rejected, Work
from penstock.protocol.wire.messages.tokens import End, RowDetails, RowStart

JOIN_SECONDS = 10.0


class Collector:
    """What has come of one prompt so far."""

    def __init__(self) -> None:
        self.request: OpenRequest | None = None
        self.texts: dict[int, list[str]] = {}
        self.details: dict[int, list[RowDetails]] = {}
        self.ends: dict[int, End] = {}
        self.cached = 0
        self.tokens = 0
        self.accepted = False
        self.rejected: Rejected | None = None

    def on_accepted(self, prompt_tokens: int) -> None:
        self.accepted = True

    def on_text(
        self,
        choice: int,
        text: str,
        tokens: int,
        end: End | None,
        start: RowStart | None = None,
        details: RowDetails | None = None,
    ) -> None:
        if details is not None:
            self.details.setdefault(choice, []).append(details)
            text = details.echo + text
        if text:
            self.texts.setdefault(choice, []).append(text)
        self.tokens += tokens
        if start is not None:
            self.cached = max(self.cached, start.cached)
        if end is not None:
            self.ends[choice] = end

    def on_rejected(self, rejected: Rejected) -> None:
        self.rejected = rejected

    @property
    def done(self) -> bool:
        request = self.request
        return self.rejected is not None or (
            request is not None and len(self.ends) == len(request.choices)
        )


class PipelineClient:
    """Joins the pipeline as a frontend. One thread at a time may use it (``lock``); while nobody
    does, a thread of its own keeps the membership up to date."""

    def __init__(self, router: str) -> None:
        """Raises ``TimeoutError`` when the router does not answer."""
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._mailbox = open_mailbox(ClusterConfig(router=router), "frontend")
        identity = Identity(os.getpid(), socket.gethostname())
        self._participant = Participant("frontend", self._mailbox, router, identity)
        self._participant.status.phase = Phase.READY
        self.ledger = ClientLedger(
            self._mailbox.address, self._mailbox.incarnation, self._participant, self._mailbox.send
        )
        self._participant.on_change = lambda gone: self.ledger.peers_gone(gone, time.monotonic())
        self._beats = BeatThread(self._participant, self._mailbox)
        self._beats.start()
        self._next_tick = 0.0
        deadline = time.monotonic() + JOIN_SECONDS
        while not (self._participant.joined and self._participant.of("scheduler", True)):
            self.pump(0.05)
            if time.monotonic() > deadline:
                self.close()
                raise TimeoutError(f"no answer from the router at {router}")
        self._keeper = threading.Thread(target=self._keep, name="penstock", daemon=True)
        self._keeper.start()

    @property
    def vocab_size(self) -> int:
        return max(p.capacity.vocab_size for p in self._participant.of("scheduler"))

    def submit(self, work: Work, collector: Collector) -> int:
        """Send a request on its way; ``pump`` brings its events. Returns its id."""
        if work.params.seed is None:
            params = msgspec.structs.replace(work.params, seed=secrets.randbits(63))
            work = msgspec.structs.replace(work, params=params)
        request_id = self.ledger.submit(work, collector, time.monotonic())
        collector.request = self.ledger.open.get(request_id)  # else it was refused at once
        return request_id

    def pump(self, seconds: float) -> None:
        """Wait up to ``seconds`` for messages and handle them. Raises ``Ended`` when fenced."""
        timeout = min(seconds, TICK_SECONDS)
        if not self._mailbox.flush():
            timeout = min(timeout, self._mailbox.retry_s())
        if self._mailbox.wait(timeout):
            now = time.monotonic()
            for sender, message in self._mailbox.drain():
                if not self._participant.handle(sender, message, now):
                    self.ledger.handle(sender, message, now)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._participant.tick(now)
            self.ledger.tick(now)

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
            for request_id in list(self.ledger.open):
                self.ledger.cancel(request_id)
            self._participant.goodbye()
            self._beats.stop()
            self._mailbox.close(linger_ms=100)
