"""The library's place in the pipeline: a mailbox, a membership, the ledger of open requests."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time

import msgspec

from penstock.client.answers import Answer, AnswerSink, RequestProgress
from penstock.client.ledger import ClientLedger
from penstock.client.meters import Meters
from penstock.client.open_request import OpenRequest
from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.service import TICK_SECONDS, open_mailbox
from penstock.protocol.wire.messages.membership import Identity, Phase
from penstock.protocol.wire.messages.requests import Work

JOIN_SECONDS = 10.0


class Submission:
    """One prompt in the pipeline, and what has come of it."""

    def __init__(self, work: Work, meters: Meters) -> None:
        self.id = 0
        self.request: OpenRequest | None = None
        """``None``: it was refused at once."""
        self.progress = RequestProgress(1, len(work.choices), meters, time.monotonic())
        self.answers = [Answer() for _ in work.choices]

    @property
    def done(self) -> bool:
        progress = self.progress
        return not progress.open_choices or bool(progress.rejected or progress.failed)


class PipelineClient:
    """Joins the pipeline as a frontend. One thread at a time may use it (``lock``); while nobody
    does, a thread of its own keeps the membership up to date."""

    def __init__(self, router: str) -> None:
        """Raises ``TimeoutError`` when the router does not answer."""
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._meters = Meters(Registry())
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
        self._model = next(p.identity.model for p in self._participant.of("scheduler", True))
        self._keeper = threading.Thread(target=self._keep, name="penstock", daemon=True)
        self._keeper.start()

    @property
    def model(self) -> str:
        """What the engine serves, by its first name; while it is away, what it last served."""
        for peer in self._participant.of("scheduler"):
            self._model = peer.identity.model
        return self._model

    def submit(self, work: Work) -> Submission:
        """Send a request on its way; ``pump`` brings its events."""
        head = msgspec.structs.replace(work.head, model=self.model)
        params = work.params
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        work = msgspec.structs.replace(work, head=head, params=params)
        submission = Submission(work, self._meters)
        sink = AnswerSink(submission.progress, submission.answers)
        submission.id = self.ledger.submit(work, sink, time.monotonic())
        submission.request = self.ledger.open.get(submission.id)
        return submission

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
