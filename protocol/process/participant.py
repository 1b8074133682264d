"""A process as a member: says hello, beats, and knows who else is there.

``Participant`` is the conversation with the router without sockets or clocks: it is fed messages
and the time. ``BeatThread`` sends the beats from a thread and a socket of its own, so that a busy
main thread is seen as busy (its current item grows old) and not as dead.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec

from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.mailbox import Mailbox
from penstock.protocol.wire.messages.membership import (
    Beat,
    BeatAnswer,
    Capacity,
    Demand,
    Fenced,
    Goodbye,
    Hello,
    Identity,
    Members,
    MetricsReport,
    Peer,
    Phase,
    PrefixReport,
    Refused,
    Sleeper,
    WhoAreYou,
    is_among,
)

BEAT_SECONDS = 0.5
HELLO_SECONDS = 0.5
UNREACHABLE_SECONDS = 5.0
"""A process that has heard nothing from the router for so long says so."""
CARRY_SECONDS = 3.0
"""How long peers known from a former router stay known while the new one has not named them."""
PAUSE_SECONDS = 1.0
"""A process that did not tick for so long was busy itself: it blames no silence on others."""
DEFAULT_ITEM_LIMIT = 10.0
MAX_WITHDRAWN = 512
"""Models that were served and are no more, of which a process knows."""

Send = Callable[[str, Message], bool]


class Ended(Exception):
    """This process must end: it was refused or fenced. The message says why."""


class Status:
    """What the beats carry. The main thread writes it, the beat thread reads it."""

    def __init__(self) -> None:
        self.phase = Phase.STARTING
        self.note = ""
        self.progress = 0
        self.item_began = 0.0
        """Monotonic time at which the current item began; 0 when idle."""
        self.item_limit = DEFAULT_ITEM_LIMIT
        self.load = 0
        self.capacity = Capacity()
        self.demands: list[Demand] = []
        self.prefixes: PrefixReport | None = None
        self.unloading: list[str] = []
        """Of a launcher: models that it ends."""
        self.sleepers: list[Sleeper] = []
        """Of a launcher: models that it has put to sleep."""
        self.metrics = msgspec.msgpack.encode(MetricsReport([]))

    def begin(self, limit: float = DEFAULT_ITEM_LIMIT) -> None:
        """An item of work starts; it may take ``limit`` seconds."""
        self.item_limit = limit
        self.item_began = time.monotonic()

    def done(self) -> None:
        self.progress += 1
        self.item_began = 0.0


class Participant:
    """One process's view of the membership."""

    def __init__(
        self,
        service: str,
        mailbox: Mailbox,
        router: str,
        identity: Identity,
        *,
        patience_s: float = UNREACHABLE_SECONDS,
    ) -> None:
        """``patience_s``: silence of the router after which ``tick`` complains."""
        self.service = service
        self.router_address = router
        self.router_incarnation = 0
        self._former_routers: set[int] = set()
        self.incarnation = mailbox.incarnation
        self.status = Status()
        self.peers: dict[int, Peer] = {}
        """Living peers by incarnation, this process not among them."""
        self.lost: set[int] = set()
        self.others: dict[str, Demand] = {}
        """For a frontend or a launcher: what the others have in the pipeline for each model and
        what its engines can run, as the router last said."""
        self.known_prefixes = 0
        """Version of this engine's prefixes that the router has; see ``PrefixReport``."""
        self.membership_version = 0
        self.served: dict[str, None] = {}
        """Models of which a tokenizer and an engine have ever been ready together, in the order in
        which they were."""
        self.withdrawn: dict[str, None] = {}
        """Models that were served and are no more, as this or a former router has said."""
        self.sleepers: dict[str, Sleeper] = {}
        """Models that sleep, by their first names; for a while also what a former router said."""
        self._told_sleepers: dict[str, Sleeper] = {}
        self.on_change: Callable[[dict[int, Peer]], None] | None = None
        """Called after each change with the peers that are gone (lost or left)."""
        self.measured: Callable[[], bytes] | None = None
        """Called by the thread that beats: the metrics of now, in place of ``Status.metrics``."""
        self._address = mailbox.address
        self._send = mailbox.send
        self._forget = mailbox.forget
        self._reopen = mailbox.reopen
        self._waiting = mailbox.outbox_bytes
        self._identity = msgspec.msgpack.encode(identity)
        self._patience = patience_s
        self._last_hello = -HELLO_SECONDS
        self._last_heard = 0.0
        self._ticked_at: float | None = None
        self._complained = False
        self._carried: set[int] = set()
        self._carried_until = 0.0

    @property
    def joined(self) -> bool:
        return self.membership_version > 0

    def of(self, service: str, ready_only: bool = False, model: str = "") -> list[Peer]:
        """Living peers of a service, oldest first; of one model, where one is named."""
        return [
            peer
            for peer in self.peers.values()
            if peer.service == service
            and (not ready_only or peer.phase == Phase.READY)
            and peer.identity.is_of(model)
        ]

    def has_served(self, model: str) -> bool:
        """Whether a tokenizer and an engine of the model have ever been ready together."""
        return is_among(model, self.served)

    def address_of(self, incarnation: int) -> str | None:
        peer = self.peers.get(incarnation)
        return peer.address if peer else None

    def tick(self, now: float) -> str | None:
        """Say hello until the router answers. Returns a complaint to log, once."""
        if self._ticked_at is None or now - self._ticked_at > PAUSE_SECONDS:
            self._last_heard = now
            self._carried_until = now + CARRY_SECONDS
        self._ticked_at = now
        self._look_sleepers(now)
        due = not self.joined and now - self._last_hello >= HELLO_SECONDS
        if due and not self._waiting(self.router_address):  # else one hello waits for it already
            self._last_hello = now
            self._hello()
        if self._carried and now > self._carried_until:
            gone = {i: self.peers.pop(i) for i in self._carried}
            self._carried = set()
            self._report_gone(gone)
        if now - self._last_heard > self._patience and not self._complained:
            self._complained = True
            return (
                f"no answer from the router at {self.router_address} for "
                f"{self._patience:.0f} s, still trying; is it running, and can it reach "
                f"{self._address} (--bind, --advertise, --secret)?"
            )
        return None

    def _look_sleepers(self, now: float) -> None:
        """A new router does not know their launcher at once."""
        if self._told_sleepers or now > self._carried_until:
            self.sleepers = self._told_sleepers

    def silence(self, now: float) -> float:
        """Seconds since the router was last heard."""
        return now - self._last_heard

    def explained(self) -> None:
        """Why the router does not answer is in the log already."""
        self._complained = True

    def _hello(self) -> None:
        self._send(
            self.router_address,
            Hello(
                self.service,
                self._address,
                self.incarnation,
                codec.PROTOCOL_VERSION,
                codec.SCHEMA_HASH,
                self._identity,
            ),
        )

    def handle(self, sender: int, message: Message, now: float) -> bool:
        """Take a message of the membership; ``False`` when it is none, or for the service.

        Raises ``Ended`` when the router refuses or fences this process.
        """
        heard_lately = self.joined and now - self._last_heard < UNREACHABLE_SECONDS
        if sender in self._former_routers and heard_lately:
            return True  # it was cut off, and takes its members for dead: the present one knows
        match message:
            case Members():
                self._heard(now)
                self._take(message, now)
            case BeatAnswer():
                self._heard(now)
                self.others = {demand.model: demand for demand in message.others}
                self.known_prefixes = message.prefixes
                if self.router_incarnation not in (0, message.router):
                    self.membership_version = 0
            case WhoAreYou():
                self._heard(now)
                self.membership_version = 0
                self.known_prefixes = 0
                self._last_hello = now
                self._hello()
            case Refused():
                raise Ended(f"refused by the router: {message.reason}; {message.remedy}")
            case Fenced():
                if message.incarnation == self.incarnation:
                    raise Ended("fenced: the router declared this process lost")
            case _:
                return sender in self.lost
        return True

    def _heard(self, now: float) -> None:
        self._last_heard = now
        self._complained = False

    def _take(self, message: Members, now: float) -> None:
        if message.router == self.router_incarnation and message.version < self.membership_version:
            return
        present = (self.router_incarnation, self.membership_version)
        if message.since and (message.router, message.since) != present:
            return  # a change of what was missed: the next beat says so, and the whole comes
        known = self.peers
        restarted = self.router_incarnation not in (0, message.router)
        if restarted:
            self._former_routers.add(self.router_incarnation)
            self._former_routers.discard(message.router)
        self.router_incarnation = message.router
        self.membership_version = message.version
        served = self.served | dict.fromkeys(message.served)
        self.served = {name: None for name in served if name not in message.withdrawn}
        left = [one for one in (*self.withdrawn, *message.withdrawn) if one not in self.served]
        self.withdrawn = dict.fromkeys(left[-MAX_WITHDRAWN:])
        self._told_sleepers = {one.model: one for one in message.sleepers}
        gone = self._carried.union(message.gone)
        kept = {i: peer for i, peer in known.items() if i not in gone} if message.since else {}
        named = {p.incarnation: p for p in message.peers if p.incarnation != self.incarnation}
        self.peers = {**kept, **named}
        self.lost.update(message.lost)
        for incarnation, peer in self.peers.items():
            if incarnation not in known:  # new, or carried too short and gone for a moment
                self._reopen(peer.address)
        if restarted:
            # A new router learns its members one by one: keep those it has not named for a while.
            self._carried = {i for i in known if i not in self.peers}
            self._carried_until = now + CARRY_SECONDS
        self._look_sleepers(now)
        self._carried -= self.lost | self.peers.keys()
        self.peers.update((i, known[i]) for i in self._carried)
        self._report_gone({i: peer for i, peer in known.items() if i not in self.peers})

    def _report_gone(self, gone: dict[int, Peer]) -> None:
        for peer in gone.values():
            if peer.address != self.router_address:  # a new router listens at the same address
                self._forget(peer.address)
        if self.on_change is not None:
            self.on_change(gone)

    def goodbye(self) -> None:
        self._send(self.router_address, Goodbye(self.incarnation))


class BeatThread(threading.Thread):
    """Sends a beat each ``BEAT_SECONDS`` until stopped, on a socket of its own."""

    def __init__(self, participant: Participant, mailbox: Mailbox) -> None:
        super().__init__(name="beats", daemon=True)
        self._participant = participant
        self._address = mailbox.address
        self._sender = mailbox.sender_only()
        self._stopped = threading.Event()
        self._wake = threading.Event()

    def run(self) -> None:
        sender = self._sender
        while not self._stopped.is_set():
            # While the router is away one beat waits for it: older ones would only mislead it.
            if sender.flush() and self._participant.joined:
                sender.send(self._participant.router_address, self.beat())
            if sender.flush():
                self._wake.wait(BEAT_SECONDS)
                self._wake.clear()
            else:
                self._stopped.wait(sender.retry_s())
        sender.close()

    def beat(self) -> Beat:
        status = self._participant.status
        began = status.item_began
        measured = self._participant.measured
        return Beat(
            self._address,
            self._participant.incarnation,
            status.phase,
            status.note,
            status.progress,
            time.monotonic() - began if began else 0.0,
            status.item_limit,
            status.load,
            status.capacity,
            status.metrics if measured is None else measured(),
            self._participant.membership_version,
            status.demands,
            list(self._participant.served),
            status.prefixes,
            status.unloading,
            status.sleepers,
        )

    def now(self) -> None:
        """Beat at once: the phase or the capacity has changed."""
        self._wake.set()

    def stop(self) -> None:
        self._stopped.set()
        self._wake.set()
        self.join(timeout=2.0)
