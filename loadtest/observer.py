"""A member of a running server that takes no work: it asks processes what they do."""

from __future__ import annotations

import os
import socket
import time
from types import TracebackType
from typing import Self

from penstock.loadtest.timeline import Recording, decoded
from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.participant import BeatThread, Participant
from penstock.protocol.process.service import TICK_SECONDS, open_mailbox
from penstock.protocol.wire.messages.membership import Identity, Peer, Phase, Trace, Traced

ANSWER_SECONDS = 15.0
"""How long after its end a recording may take to arrive."""
SERVICES = ("frontend", "tokenizer", "router", "scheduler", "worker")


class Observer:
    """Joins the server of a router; ``peers`` are its processes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """Raises ``AddressError`` and ``SecurityError``."""
        self._mailbox = open_mailbox(cluster, "observer")
        identity = Identity(os.getpid(), socket.gethostname())
        self._participant = Participant("observer", self._mailbox, cluster.router, identity)
        self._participant.status.phase = Phase.READY
        self._beats = BeatThread(self._participant, self._mailbox)
        self._beats.start()
        self._next_tick = 0.0
        self._recordings: dict[int, Recording] = {}

    def join(self, seconds: float) -> bool:
        """Whether the router answered in time. Raises ``Ended`` when it refuses."""
        deadline = time.monotonic() + seconds
        while not self._participant.joined and time.monotonic() < deadline:
            self._pump(0.05)
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

    def record(self, seconds: float) -> list[Recording]:
        """Let all processes record for so long; returns what came. Raises ``Ended``."""
        self._recordings = {peer.incarnation: Recording(peer) for peer in self.peers}
        for recording in self._recordings.values():
            self._mailbox.send(recording.peer.address, Trace(self._mailbox.address, seconds))
        deadline = time.monotonic() + seconds + ANSWER_SECONDS
        while time.monotonic() < deadline and not self._complete():
            self._pump(TICK_SECONDS)
        return list(self._recordings.values())

    def _complete(self) -> bool:
        """Whether there is nothing to wait for: a process that is gone sends nothing more."""
        living = self._participant.peers
        return all(
            recording.whole or recording.refused or incarnation not in living
            for incarnation, recording in self._recordings.items()
        )

    def _pump(self, seconds: float) -> None:
        timeout = seconds if self._mailbox.flush() else min(seconds, self._mailbox.retry_s())
        if self._mailbox.wait(timeout):
            now = time.monotonic()
            for sender, message in self._mailbox.drain():
                if isinstance(message, Traced):
                    self._take(sender, message)
                else:
                    self._participant.handle(sender, message, now)
        now = time.monotonic()
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._participant.tick(now)

    def _take(self, sender: int, piece: Traced) -> None:
        recording = self._recordings.get(sender)
        if recording is None:
            return
        recording.refused = piece.refused
        recording.spans.extend(decoded(piece.names, piece.events))
        recording.dropped = piece.dropped
        recording.whole = not piece.more and not piece.refused

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
