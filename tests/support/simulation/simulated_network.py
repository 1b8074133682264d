"""A virtual clock, and a network on which messages get lost, late, doubled and out of order.

Every message goes through the real codec. A pair of processes keeps its order (as a ZeroMQ
connection does), except for what comes twice; different pairs overtake each other freely.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from typing import TypeVar

from penstock.protocol.process.participant import Ended, Participant
from penstock.protocol.wire import codec
from penstock.protocol.wire.messages.membership import Beat, Identity, Peer, Phase

ROUTER = "ipc:///sim/router.sock"
TICK = 0.25
BEAT = 0.5
LATEST_DOUBLE = 2.0
"""A message that comes twice comes the second time within so many seconds."""

N = TypeVar("N", bound="Node")


class World:
    """The virtual clock, the network, and all processes."""

    def __init__(
        self, seed: int, loss: float = 0.0, delay: float = 0.005, doubles: float = 0.0
    ) -> None:
        """loss, doubles: shares of the messages. delay: mean seconds on the way."""
        self.random = random.Random(seed)
        self.now = 0.0
        self.loss = loss
        self.delay = delay
        self.doubles = doubles
        self.nodes: dict[str, Node] = {}
        self.messages = 0
        self.log: list[str] = []
        """What processes said in their logs, for whoever looks into a failure."""
        self.wrong: list[BaseException] = []
        """What a process must never do, seen where its own handlers would swallow it."""
        self.whole: dict[tuple[int, int], dict[int, list[int]]] = {}
        """(epoch, step) → tokens of the slots that the plan adds, as the scheduler has them."""
        self.ranks_in: dict[tuple[int, int], int] = {}
        """(epoch, step) → ranks that take part in it: none can finish it before all do."""
        self.before: dict[int, int] = {}
        """Where blocks are kept: content of K and V → that of the position before."""
        self.failures = 0
        """Steps that have failed, and workers and schedulers that have ended."""
        self.on_death: Callable[[Node], None] = lambda node: None
        """What follows when a process has ended by itself."""
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._last_arrival: dict[tuple[int, str], float] = {}

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), action))

    def run(self, until: float) -> None:
        """Let time pass. Raises the first of what went ``wrong``."""
        while self._events and self._events[0][0] <= until:
            self.now, _, action = heapq.heappop(self._events)
            action()
            if self.wrong:
                raise self.wrong[0]
        self.now = until

    def transmit(self, sender: int, address: str, frame: bytes) -> None:
        self.messages += 1
        if self.random.random() < self.loss:
            return
        arrival = self.now + self.random.expovariate(1 / self.delay)
        pair = (sender, address)
        arrival = max(arrival, self._last_arrival.get(pair, 0.0))
        self._last_arrival[pair] = arrival
        self.after(arrival - self.now, lambda: self._arrive(address, frame))
        if self.random.random() < self.doubles:
            later = arrival - self.now + self.random.random() * LATEST_DOUBLE
            self.after(later, lambda: self._arrive(address, frame))

    def _arrive(self, address: str, frame: bytes) -> None:
        node = self.nodes.get(address)
        if node is not None:
            node.receive(*codec.decode(frame))

    def kill(self, node: Node) -> None:
        node.alive = False
        if self.nodes.get(node.address) is node:
            del self.nodes[node.address]

    def die(self, node: Node) -> None:
        """It ends by itself."""
        self.kill(node)
        self.on_death(node)

    def stop(self, node: Node) -> None:
        """What arrives waits for it; whether it ever goes on, nobody knows."""
        node.alive = False
        node.unread = []

    def go_on(self, node: Node) -> None:
        """It reads what has arrived meanwhile, and knows nothing of the time that has passed."""
        node.alive = True
        unread, node.unread = node.unread, None
        node.go_on()
        for sender, message in unread or []:
            node.receive(sender, message)

    def of(self, kind: type[N]) -> list[N]:
        return [node for node in self.nodes.values() if isinstance(node, kind)]


class Node:
    """One process: an address, an incarnation, a participant, a timer. It is its own mailbox."""

    service = ""
    malformed = sent = sent_bytes = refused = 0

    def __init__(self, world: World, address: str = "") -> None:
        self.world = world
        self.incarnation = world.random.getrandbits(62) | 1
        self.address = address or f"ipc:///sim/{self.service}-{self.incarnation:x}.sock"
        self.alive = True
        self.is_replaced = False
        """Somebody starts another process in its place, or has done so."""
        self.unread: list[tuple[int, codec.Message]] | None = None
        """What has come to a stopped process."""
        self.closed: set[str] = set()
        self._encode = codec.Encoder(self.incarnation)
        self.participant = self.join()
        self.participant.on_change = self._changed
        world.nodes[self.address] = self
        world.after(world.random.random() * TICK, self._tick)
        world.after(world.random.random() * BEAT, self._beat)

    def join(self) -> Participant:
        """The conversation with the router, of a process that is ready at once."""
        participant = Participant(self.service, self, ROUTER, Identity(1, "sim"))
        participant.status.phase = Phase.READY
        return participant

    def replacement(self) -> Node:
        """Starts the process that the launcher starts in the place of this one."""
        return type(self)(self.world)

    # What the mailbox does.

    def send(self, address: str, message: codec.Message) -> bool:
        if address in self.closed or not self.alive:
            return False
        self.world.transmit(self.incarnation, address, self._encode(message))
        return True

    def send_last(self, address: str, message: codec.Message) -> None:
        self.world.transmit(self.incarnation, address, self._encode(message))

    def forget(self, address: str) -> None:
        self.closed.add(address)

    def reopen(self, address: str) -> None:
        self.closed.discard(address)

    def outbox_bytes(self, address: str = "") -> int:
        return 0

    # What the loop does.

    def receive(self, sender: int, message: codec.Message) -> None:
        if self.unread is not None:
            self.unread.append((sender, message))
        if not self.alive:
            return
        try:
            if not self.participant.handle(sender, message, self.world.now):
                self.on_message(sender, message)
        except Ended:
            self.world.die(self)

    def go_on(self) -> None:
        """The timers of a process that was stopped run again."""
        self._tick()
        self._beat()

    def _tick(self) -> None:
        if self.alive:
            self.world.after(TICK, self._tick)
            self.participant.tick(self.world.now)
            self.on_tick()

    def _beat(self) -> None:
        if self.alive:
            self.world.after(BEAT, self._beat)
            self.beat()

    def beat(self) -> None:
        if not (self.alive and self.participant.joined):
            return
        status = self.participant.status
        self.send(
            ROUTER,
            Beat(
                self.address, self.incarnation, status.phase, status.note, 0, 0.0, 0.0,
                self.load(), status.capacity, b"", self.participant.membership_version,
                status.demands, list(self.participant.served),
            ),
        )  # fmt: skip

    def _changed(self, gone: dict[int, Peer]) -> None:
        if self.alive:
            self.on_gone(gone)

    # What its service does.

    def load(self) -> int:
        return self.participant.status.load

    def num_open(self) -> int:
        """Requests that it holds."""
        return 0

    def num_remembered(self) -> int:
        """Entries that it keeps of requests which have ended."""
        return 0

    def on_message(self, sender: int, message: codec.Message) -> None: ...

    def on_tick(self) -> None: ...

    def on_gone(self, gone: dict[int, Peer]) -> None: ...
