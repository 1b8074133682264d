"""What an engine that decodes tells prefill engines, and what it gives back to them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import msgspec
from support.scheduler.kept_engine import Keeper, KeptEngine
from support.scheduler.scheduler_harness import prompt, small

from penstock.protocol.process.metrics import Registry
from penstock.protocol.wire.messages.hand_overs import DecodeRoom
from penstock.protocol.wire.messages.membership import Identity
from penstock.services.scheduler.hand_overs import MOST_HAND_OVERS
from penstock.services.scheduler.take_overs import TELL_SECONDS, TURN_SECONDS, TakeOvers

PREFILL = SimpleNamespace(
    identity=Identity(1, "host", "0", role="prefill"), incarnation=7, address="ipc:///prefill"
)


class DecodeEngine(KeptEngine):
    """An engine with two slots beside a prefill engine."""

    def __init__(self, **limits: int) -> None:
        super().__init__(small(**{"max_num_seqs": 2, **limits}), Keeper())
        self.peers: list[Any] = [PREFILL]
        self.others_are_ready = True
        self.sent: list[tuple[str, DecodeRoom]] = []
        self.given_back: list[int] = []
        service: Any = SimpleNamespace(
            participant=SimpleNamespace(of=self._of),
            mailbox=SimpleNamespace(send=lambda *sent: self.sent.append(sent) or True),
            identity=lambda: Identity(2, "host", "1", role="decode"),
        )
        self.take_overs = TakeOvers(service, self.core)
        self.metrics = Registry()
        self.ledger: Any = SimpleNamespace(hand_over=self._hand_over)

    def _of(self, service: str, *, ready_only: bool = False, model: str = "") -> list[Any]:
        return [] if ready_only and not self.others_are_ready else self.peers

    def _hand_over(self, numbers: frozenset[int], *, prefilled: bool) -> None:
        assert prefilled
        for number in numbers:
            self.given_back.append(number)
            self.cancel(number)

    def handed(self, number: int, hand_overs: int = 1) -> None:
        """A request that another engine has handed over."""
        assert self.submit(number, prompt(20, number), 8, accepted=True) is None
        request = self.core._requests.get(number)
        assert request is not None
        request.head = msgspec.structs.replace(request.head, hand_overs=hand_overs)

    def tick(self) -> list[DecodeRoom]:
        """What it tells."""
        self.sent.clear()
        self.take_overs.tick(self.ledger, self.metrics, self.now)
        return [room for _, room in self.sent]


def test_an_engine_tells_its_room_when_it_changes_and_once_a_second() -> None:
    engine = DecodeEngine()
    engine.now = 10.0
    assert engine.tick() == [DecodeRoom(2, 16)]
    assert engine.tick() == []
    engine.now += TELL_SECONDS
    assert engine.tick() == [DecodeRoom(2, 16)], "the first may be lost"
    engine.handed(1)
    (waits,) = engine.tick()
    assert (waits.sequences, waits.blocks) == (1, 10), "it has not begun, but will"
    engine.plan()
    assert engine.tick() == [], "it takes no more than was reckoned with"
    engine.peers = []
    engine.now += TELL_SECONDS
    assert engine.tick() == [], "nobody hands over"


def test_what_waits_for_its_turn_for_too_long_is_given_back() -> None:
    engine = DecodeEngine(num_blocks=60)
    for number in (1, 2, 3):
        engine.handed(number)
    engine.handed(4, MOST_HAND_OVERS)
    assert engine.submit(5, prompt(20), 8) is None
    engine.plan()
    engine.tick()
    assert engine.given_back == [], "its turn may come"
    engine.now += TURN_SECONDS + 0.01
    engine.others_are_ready = False
    engine.tick()
    assert engine.given_back == [], "nobody else is there"
    engine.others_are_ready = True
    engine.tick()
    assert engine.given_back == [3], "one that has come back often stays, as do new ones"
    assert engine.metrics.counter("hand_overs_returned_total").value == 1
    engine.run()
    for number in (1, 2, 4, 5):
        engine.assert_finished(number)


def test_what_waits_for_its_blocks_is_not_given_back() -> None:
    engine = DecodeEngine()
    first = KeptEngine(small(), engine.keeper, after=0)
    first.submit(1, prompt(20, 1), 8)
    first.run()
    engine.open()
    engine.silent = True
    engine.handed(1)
    engine.plan()
    engine.now += TURN_SECONDS + 0.01
    engine.tick()
    assert engine.given_back == []
