"""The router's record of one process."""

from __future__ import annotations

import msgspec

from penstock.protocol.wire.messages.membership import (
    Capacity,
    Demand,
    Hello,
    Identity,
    MetricsReport,
    Peer,
    Phase,
    Sleeper,
)

SILENCE_SECONDS = 3.0
"""Six beats missed: the process is dead or cut off."""
TCP_SILENCE_SECONDS = 5.0
"""The same on tcp while the connection holds. Where answers to a host are lost, its system sends
again after 0.2, 0.6, 1.4 and 3 s, and no new beat meanwhile: two lost seconds are three of silence.
A process that ends takes its connections with it."""
LOADING_SILENCE_SECONDS = 60.0
"""The same of a process of ``LOADERS`` that was never ready, while its connection holds: nothing is
lost with it, and one import may keep its threads from running for long (torch's libraries come from
a cold disk, or the machine is crowded)."""
LOADERS = frozenset({"worker", "tokenizer"})
RECKONED_SECONDS = 0.6
"""Requests are reckoned to end for so long after a beat: the next one is due then."""
REPAIR_SECONDS = 2.0
"""A member that has missed a change gets the whole membership so often at most: it may only be too
busy to read what it was sent."""
ENDING_SECONDS = 2.0
"""Over so long the pace of requests that end is a mean."""
_decode_report = msgspec.msgpack.Decoder(MetricsReport).decode


class Member:
    """One living process."""

    __slots__ = (
        "_adapters", "address", "beaten_at", "beats", "broken_at", "capacity", "connected",
        "demands", "due",
        "ending", "heard_at", "identity", "incarnation", "item_age", "item_limit", "load",
        "metrics", "note", "number", "phase", "recent", "repaired_at", "routed", "said", "service",
        "sleepers", "slots", "told", "unloading", "was_ready",
    )  # fmt: skip

    def __init__(self, hello: Hello, identity: Identity, now: float, number: int = 0) -> None:
        """``number``: which of its service's living processes it is, from 0 on."""
        self.number = number
        self.service = hello.service
        self.address = hello.address
        self.incarnation = hello.incarnation
        self.identity = self.said = identity
        """The same but for the model's name, which a scheduler may have decided."""
        self.heard_at = now
        self.connected = True
        """Our connection to it has not broken since its last beat."""
        self.broken_at: float | None = None
        """When its connection was seen to break, which means that it has ended."""
        self.phase = Phase.STARTING
        self.was_ready = False
        self.note = ""
        self.capacity = Capacity()
        self._adapters: frozenset[str] = frozenset()
        """Digests of those that it has loaded."""
        self.demands: list[Demand] = []
        self.slots = 1
        """Choices that it runs at the same time."""
        self.unloading: list[str] = []
        """Models that this launcher ends."""
        self.sleepers: list[Sleeper] = []
        """Models that this launcher has put to sleep."""
        self.load = 0
        """Choices of requests that are open there, as its last beat says."""
        self.routed = 0
        """Choices sent there since its last beat, which does not count them yet."""
        self.beats = 0
        self.beaten_at = now
        self.ending = 0.0
        """Choices that end there in a second, as its beats show."""
        self.recent = 0.0
        """Requests sent there lately; they fade (``Placement.tick``)."""
        self.item_age = 0.0
        self.item_limit = 0.0
        self.metrics = b""
        self.told = 0
        """Version of the membership that it was last sent; 0: it needs the whole."""
        self.due = 0
        """Version that it had been sent when it last beat: the next beat should say it."""
        self.repaired_at = -REPAIR_SECONDS

    @property
    def name(self) -> str:
        """As metrics and spans call it."""
        return f"{self.service}-{self.number}"

    @property
    def silence_limit(self) -> float:
        """Seconds without a beat, after which it is lost."""
        if not self.connected:
            return SILENCE_SECONDS
        if self.service in LOADERS and not self.was_ready:
            return LOADING_SILENCE_SECONDS
        return TCP_SILENCE_SECONDS if self.address.startswith("tcp://") else SILENCE_SECONDS

    def may_do(self, task: str) -> bool:
        """Whether it does a task, as far as is known: an engine that loads has not said yet."""
        known = self.phase == Phase.READY or self.capacity.max_model_len > 0
        return not (task and known) or task in self.capacity.done

    def has(self, adapter: str) -> bool:
        """Whether it has loaded the adapter with this digest."""
        return adapter in self._adapters

    @property
    def model(self) -> str:
        return self.identity.model

    def open_at(self, now: float) -> float:
        """Choices that are open there now, about. It beats twice a second, each at another moment:
        without those that end meanwhile, whoever beat last would seem to have the most room. From
        one that has stopped beating no more is expected to end."""
        since = min(now - self.beaten_at, RECKONED_SECONDS)
        return max(0.0, self.load + self.routed - self.ending * since)

    def says(self, capacity: Capacity, demands: list[Demand]) -> None:
        """Its sizes."""
        if self.capacity.adapters != capacity.adapters:
            self._adapters = frozenset(one.digest for one in capacity.adapters)
        self.capacity, self.demands = capacity, demands
        self.slots = sum(demand.slots for demand in demands) or capacity.max_num_seqs or 1

    def beaten(self, load: int, now: float) -> None:
        """It says how many choices are open there."""
        passed = now - self.beaten_at
        if passed > 0:
            ended = max(0, self.load + self.routed - load)
            self.ending += min(1.0, passed / ENDING_SECONDS) * (ended / passed - self.ending)
        self.load, self.routed, self.beaten_at = load, 0, now
        self.beats += 1

    def peer(self) -> Peer:
        return Peer(
            self.service,
            self.address,
            self.incarnation,
            self.identity,
            self.phase,
            self.note,
            self.capacity,
            self.load,
        )

    def report(self) -> MetricsReport:
        try:
            return _decode_report(self.metrics) if self.metrics else MetricsReport([])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return MetricsReport([])
