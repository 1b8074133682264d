"""The launcher as a member of its own server: it learns every process's phase from the router."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Sequence

from msgspec.msgpack import encode

from penstock.protocol.config import ClusterConfig
from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import (
    UNREACHABLE_SECONDS,
    BeatThread,
    Ended,
    Participant,
)
from penstock.protocol.process.plain_structlog import Logger
from penstock.protocol.process.service import open_mailbox
from penstock.protocol.wire.messages.administration import Ask, Told
from penstock.protocol.wire.messages.membership import Demand, Died, Identity, Peer, Phase, Sleeper

HOST = socket.gethostname()
_NOTHING = Demand()
REJOIN_SECONDS = 3.0
"""A router that says nothing to a member that joined anew for so long hangs."""


class ClusterView:
    """Who is there, as the router says."""

    def __init__(self, cluster: ClusterConfig, log: Logger) -> None:
        self.generation = 0
        """Counts the times that this process joined anew; each brings another ``fd``."""
        self.router_hangs = False
        """The router does not answer, not even a new member; until one does."""
        self.on_ask: Callable[[Ask], Told] | None = None
        """Answers the questions of frontends."""
        self.on_told: Callable[[int, Told], None] | None = None
        """Takes the answers to ``ask``, with the incarnation of who answers."""
        self.on_pump: Callable[[float], None] | None = None
        """Called whenever the inbox has been looked at, with the time."""
        self._unloading: list[str] = []
        self._sleepers: list[Sleeper] = []
        self._served: dict[str, None] = {}
        self._metrics = b""
        self._ended: set[int] = set()
        """Incarnations of this host's members whose end was seen."""
        self._cluster = cluster
        self._log = log
        self._lost: list[Peer] = []
        self._seen: dict[int, str] = {}
        """Addresses of this host's members by pid, also of those that are gone."""
        self._open()

    def _open(self) -> None:
        self.generation += 1
        self._mailbox = open_mailbox(self._cluster, "launcher")
        self._participant = Participant(
            "launcher",
            self._mailbox,
            self._cluster.router,
            Identity(os.getpid(), HOST),
            patience_s=UNREACHABLE_SECONDS if self.generation == 1 else REJOIN_SECONDS,
        )
        self._participant.status.phase = Phase.READY
        self._participant.status.unloading = self._unloading
        self._say_sleepers()
        self._participant.on_change = self._on_change
        self._beats = BeatThread(self._participant, self._mailbox)
        self._beats.start()

    @property
    def fd(self) -> int:
        """Readable when there may be something to ``pump``; edge triggered."""
        return self._mailbox.fd

    @property
    def joined(self) -> bool:
        return self._participant.joined

    def own(self) -> dict[int, Peer]:
        """Living members on this host by pid."""
        peers = self._participant.peers.values()
        return {peer.identity.pid: peer for peer in peers if peer.identity.host == HOST}

    def everybody(self) -> list[Peer]:
        """Members on all hosts, but for those whose end was seen here: the ones that ended while
        the router was away are kept for a while under the next one."""
        peers = self._participant.peers
        self._ended &= peers.keys()
        return [peer for number, peer in peers.items() if number not in self._ended]

    def open_requests(self, model: str) -> int:
        """What clients wait for, as the router said in its answer to the last beat."""
        return self.demand(model).open

    def demand(self, model: str) -> Demand:
        """The same, with what has ended and what waits in the router."""
        return self._participant.others.get(model, _NOTHING)

    def launchers(self) -> list[Peer]:
        """Those of other hosts."""
        return [peer for peer in self._participant.peers.values() if peer.service == "launcher"]

    def ask(self, address: str, what: str, about: bytes) -> None:
        """Put a question to another process; ``on_told`` gets the answer."""
        self._mailbox.send(address, Ask(self._mailbox.address, 0, what, about))

    def drain(self) -> None:
        """Tell the others that this server ends."""
        self._participant.status.phase = Phase.DRAINING
        self._beats.now()

    def unload(self, models: Sequence[str]) -> None:
        """Tell the router which models are to get no more requests."""
        self._unloading = self._participant.status.unloading = list(models)
        self._beats.now()

    def sleep(self, sleepers: Sequence[Sleeper]) -> None:
        """Tell the router which models sleep."""
        self._sleepers = list(sleepers)
        self._say_sleepers()
        self._beats.now()

    def serve(self, models: Sequence[str]) -> None:
        """Tell the router that models are served, though they may not have been ready yet."""
        self._served = dict.fromkeys(models)
        self._say_sleepers()
        self._beats.now()

    def _say_sleepers(self) -> None:
        status = self._participant.status
        status.sleepers = self._sleepers
        status.metrics = self._metrics or status.metrics
        self._participant.served |= self._served

    def report(self, metrics: Registry) -> None:
        """Hand what is counted to the beats."""
        self._metrics = self._participant.status.metrics = encode(metrics.report())

    def pump(self, now: float) -> list[Peer]:
        """Handle all that is in the inbox. Returns the peers of this host that the router has
        declared lost since the last call: they may still live, stopped or stuck, and hold memory.

        Raises ``Ended`` when the router speaks another protocol.
        """
        try:
            while True:
                for sender, message in self._mailbox.drain():
                    if self._participant.handle(sender, message, now):
                        continue
                    if isinstance(message, Ask) and self.on_ask is not None:
                        self._mailbox.send(message.reply_to, self.on_ask(message))
                    elif isinstance(message, Told) and self.on_told is not None:
                        self.on_told(sender, message)
                if not self._mailbox.has_messages():
                    break
        except Ended as cause:
            if "fenced" not in str(cause):
                raise
            self._rejoin("the router had declared the launcher lost")
        for refusal in self._mailbox.complaints():
            self._log.error(refusal)
        complaint = self._participant.tick(now)
        if complaint:
            self._unheard(complaint)
        elif self.joined:
            self.router_hangs = False
        self._mailbox.flush()
        if self.on_pump is not None:
            self.on_pump(now)
        lost, self._lost = self._lost, []
        return lost

    def _unheard(self, complaint: str) -> None:
        """No word from the router: it may hang, or have declared this process lost (the machine
        slept, or this process was stopped) without its word arriving. A new member finds out."""
        if self.joined:
            self._rejoin("nothing heard from the router")
        elif self.generation > 1:
            self._log.error(complaint)
            self.router_hangs = True
        else:
            self._log.warning(complaint)

    def _rejoin(self, reason: str) -> None:
        self._log.warning(f"{reason}; joining again")
        self.close()
        self._open()

    def _on_change(self, gone: dict[int, Peer]) -> None:
        for pid, peer in self.own().items():
            self._seen[pid] = peer.address
        for incarnation, peer in gone.items():
            if incarnation in self._participant.lost and peer.identity.host == HOST:
                self._lost.append(peer)

    def died(self, pid: int) -> None:
        """Tell the router of a process's end, and remove the ipc files that it left."""
        self._mailbox.send(self._participant.router_address, Died(pid, HOST))
        if (peer := self.own().get(pid)) is not None:
            self._ended.add(peer.incarnation)
        address = self._seen.pop(pid, "")
        if address.startswith("ipc://"):
            path = address.removeprefix("ipc://")
            for name in (path, path.removesuffix(".sock") + ".lock"):
                if os.path.exists(name):
                    os.unlink(name)

    def close(self, *, goodbye: bool = False) -> None:
        """Leave, by default without a word: by then the router has ended."""
        self._beats.stop()
        if goodbye and self.joined:
            self._participant.goodbye()
        self._mailbox.close(linger_ms=500 if goodbye else 0)
