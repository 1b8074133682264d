"""Asks the processes of a running server to record what they do."""

from __future__ import annotations

import time

from penstock.loadtest.recordings.timeline import Recording, decoded
from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.onlooker import Onlooker
from penstock.protocol.process.service import TICK_SECONDS
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.membership import Trace, Traced

ANSWER_SECONDS = 15.0
"""How long after its end a recording may take to arrive."""


class Observer(Onlooker):
    """Joins the server of a router and records its processes."""

    def __init__(self, cluster: ClusterConfig) -> None:
        """Raises ``AddressError`` and ``SecurityError``."""
        self._recordings: dict[int, Recording] = {}
        super().__init__(cluster)

    def record(self, seconds: float) -> list[Recording]:
        """Let all processes record for so long; returns what came. Raises ``Ended``."""
        self._recordings = {peer.incarnation: Recording(peer) for peer in self.peers}
        for recording in self._recordings.values():
            self._mailbox.send(recording.peer.address, Trace(self._mailbox.address, seconds))
        deadline = time.monotonic() + seconds + ANSWER_SECONDS
        while time.monotonic() < deadline and not self._complete():
            self.pump(TICK_SECONDS)
        return list(self._recordings.values())

    def _complete(self) -> bool:
        """Whether there is nothing to wait for: a process that is gone sends nothing more."""
        living = self._participant.peers
        return all(
            recording.whole or recording.refused or incarnation not in living
            for incarnation, recording in self._recordings.items()
        )

    def take(self, sender: int, message: Message) -> bool:
        if not isinstance(message, Traced):
            return False
        recording = self._recordings.get(sender)
        if recording is not None:
            recording.refused = message.refused
            recording.spans.extend(decoded(message.names, message.events))
            recording.dropped = message.dropped
            recording.whole = not message.more and not message.refused
        return True
