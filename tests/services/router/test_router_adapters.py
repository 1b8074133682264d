"""Requests for an adapter go to engines that have loaded it."""

from __future__ import annotations

from typing import Any

import msgspec
from support.counted import instructions

from penstock.protocol.wire import codec
from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.membership import (
    Beat,
    Capacity,
    Hello,
    Identity,
    MetricsReport,
    Phase,
)
from penstock.protocol.wire.messages.requests import Enqueue, Rejected, first_attempt
from penstock.services.router.dispatch import YOUNG_SECONDS, Dispatcher
from penstock.services.router.roster import Roster

FIRST = first_attempt(1)
encode = msgspec.msgpack.encode


class World:
    """A router without its process, before engines that have loaded these adapters."""

    def __init__(self, *engines: str) -> None:
        self.now = 1000.0
        self.sent: list[tuple[str, Any]] = []
        self.roster = Roster(99, self.send, self.send, lambda _: None, lambda *_: None)
        self.dispatcher = Dispatcher(self.roster, self.send, self.now)
        self.joined(99, "tokenizer")
        for number, adapters in enumerate(engines, 1):
            self.engine(number, adapters)
        self.now += YOUNG_SECONDS + 0.1

    def send(self, to: str, message: Message) -> bool:
        self.sent.append((to, message))
        return True

    def engine(self, number: int, adapters: str, phase: str = Phase.READY) -> None:
        """One joins, or says anew how it is."""
        loaded = [Adapter(one, one) for one in adapters]
        capacity = Capacity(max_model_len=64, vocab_size=99, adapters=loaded)
        self.joined(number, "scheduler", phase, capacity)

    def joined(
        self,
        number: int,
        service: str,
        phase: str = Phase.READY,
        capacity: Capacity = Capacity(),  # noqa: B008 - it is frozen
    ) -> None:
        protocol = codec.PROTOCOL_VERSION, codec.SCHEMA_HASH
        hello = Hello(service, str(number), number, *protocol, encode(Identity(number, "host")))
        self.roster.hello(hello, self.now)
        self.roster.beat(
            Beat(
                *(str(number), number, phase, "", 1, 0.0, 0.0, 0),
                *(capacity, encode(MetricsReport([])), 10**6),
            ),
            self.now,
        )

    def enqueue(self, number: int, adapter: str, attempt: int = FIRST) -> None:
        message = Enqueue(number, attempt, "t", b"work", adapter=adapter)
        self.dispatcher.request(message, self.now)

    def where(self) -> list[str]:
        found = [to for to, message in self.sent if isinstance(message, Enqueue)]
        self.sent.clear()
        return found


def test_a_request_goes_only_to_an_engine_that_has_its_adapter() -> None:
    world = World("a", "b", "ab")
    for number in range(6):
        world.enqueue(number, "b")
    assert sorted(set(world.where())) == ["2", "3"]
    for number in range(6, 9):
        world.enqueue(number, "")
    assert "1" in world.where()


def test_what_no_engine_has_is_answered_as_soon_as_one_has_said_so() -> None:
    world = World("a", "")
    world.enqueue(1, "b")  # an engine that has just unloaded it may still take it
    assert len(world.where()) == 1
    world.enqueue(1, "b", FIRST + 1)
    ((to, refused),) = world.sent
    assert to == "t" and isinstance(refused, Rejected) and refused.status == 503
    assert "no engine that is there has the adapter" in refused.message
    assert not len(world.dispatcher.held)


def test_a_request_costs_the_same_however_many_adapters_an_engine_has() -> None:
    def cost(count: int) -> int:
        names = [chr(0x4E00 + number) for number in range(count)]
        world = World("".join(names), names[0])
        return instructions(lambda: world.enqueue(1, names[-1]))

    assert cost(1000) == cost(10)


def test_an_engine_that_says_anew_what_it_has_is_believed() -> None:
    world = World("a", "b")
    world.engine(1, "c")
    for number, adapter in enumerate("bc", 1):
        world.enqueue(number, adapter)
    assert world.where() == ["2", "1"]


def test_a_request_waits_for_an_engine_that_loads_and_may_have_its_adapter() -> None:
    world = World("a")
    world.engine(2, "", Phase.LOADING)
    world.enqueue(1, "b")
    assert world.where() == []
    world.engine(2, "b")
    world.dispatcher.tick(world.now)
    assert world.where() == ["2"]
