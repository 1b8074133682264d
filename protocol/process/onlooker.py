"""A member of a running server that takes no work: it sees who is there and asks what they do."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType
from typing import Self

from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.service import TICK_SECONDS, open_mailbox
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import (
    Identity,
    MetricsAnswer,
    MetricsQuery,
    Peer,
    Phase,
)

SERVICES = ("frontend", "tokenizer", "router", "scheduler", "worker", "keeper", "holder")
"""In the order of a request's way."""


class Onlooker:
    """Joins the server of a router; ``peers`` are its processes. Its methods raise ``Ended`` when
    the router refuses it or declares it lost."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """Raises ``AddressError`` and ``SecurityError``."""
        self._mailbox = open_mailbox(cluster, "observer")
        identity = Identity(os.getpid(), socket.gethostname())
        self._participant = Participant("observer", self._mailbox, cluster.router, identity)
        self._participant.status.phase = Phase.READY
        self._beats = BeatThread(self._participant, self._mailbox)
        self._beats.start()
        self._next_tick = 0.0
        self._metrics: MetricsAnswer | None = None

    def join(self, seconds: float) -> bool:
        """Whether the router answered in time."""
        deadline = time.monotonic() + seconds
        while not self._participant.joined and time.monotonic() < deadline:
            self.pump(0.05)
        return self._participant.joined

    @property
    def peers(self) -> list[Peer]:
        """The processes of the server in the order of a request's way, without those of a
        library, whose place is a frontend's but which answer no observer."""
        found = [
            peer
            for peer in self._participant.peers.values()
            if peer.service in SERVICES and (peer.service != "frontend" or peer.identity.http)
        ]
        found.sort(key=lambda peer: (SERVICES.index(peer.service), peer.identity.engine))
        return found

    def metrics(self, seconds: float) -> MetricsAnswer | None:
        """What all processes have counted, as the router knows it; ``None``: it did not answer in
        time."""
        self._metrics = None
        query = MetricsQuery(self._mailbox.address)
        self._mailbox.send(self._participant.router_address, query)
        deadline = time.monotonic() + seconds
        while self._metrics is None and time.monotonic() < deadline:
            self.pump(0.05)
        return self._metrics

    def pump(self, seconds: float) -> None:
        """Take what comes within so many seconds; returns as soon as something has."""
        timeout = seconds if self._mailbox.flush() else min(seconds, self._mailbox.retry_s())
        if self._mailbox.wait(timeout):
            now = time.monotonic()
            for sender, message in self._mailbox.drain():
                if isinstance(message, MetricsAnswer):
                    self._metrics = message
                elif not self.take(sender, message):
                    self._participant.handle(sender, message, now)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._participant.tick(now)

    def take(self, sender: int, message: Message) -> bool:
        """Whether a message was for a subclass."""
        return False

    def close(self) -> None:
        self._participant.goodbye()
        self._beats.stop()
        self._mailbox.close(linger_ms=200)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
