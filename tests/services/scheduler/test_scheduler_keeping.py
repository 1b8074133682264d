"""An engine takes requests once it knows what is kept, or a few seconds later without."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from support.scheduler.kept_engine import SPACE
from support.scheduler.scheduler_harness import Engine, small

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import TierKeys, TierOpen, TierOpened
from penstock.services.scheduler.keeping import KEEPER_SECONDS, OPEN_SECONDS, Keeping

KEEPER = 7
"""Its incarnation."""


class Talk:
    """The scheduler's side of a conversation with a keeper, of which the test plays the other."""

    def __init__(self, keepers: int = 1) -> None:
        self.said: list[Message] = []
        self.log: list[str] = []
        peer = SimpleNamespace(
            address="keeper", incarnation=KEEPER, identity=SimpleNamespace(host="host")
        )
        service: Any = SimpleNamespace(
            mailbox=SimpleNamespace(
                address="S", send=lambda to, message: self.said.append(message)
            ),
            log=SimpleNamespace(
                error=lambda text, **more: self.log.append(text), warning=self.log.append
            ),
            participant=SimpleNamespace(of=lambda name: [peer] * keepers),
            config=SimpleNamespace(
                cache=SimpleNamespace(kv_tier_store_after=1),
                scheduler=SimpleNamespace(role="both"),
            ),
        )
        engine: Any = SimpleNamespace(kv_space=SPACE, kv_slot_bytes=64, kv_piece_bytes=0)
        group: Any = None
        self.keeping = Keeping(service, Engine(small()).core, engine, group, 0.0)


@pytest.fixture(autouse=True)
def _on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "host")


def test_an_engine_waits_for_the_keys_of_its_keeper_which_it_asks_at_once() -> None:
    talk = Talk()
    (asked,) = talk.said
    assert isinstance(asked, TierOpen)
    assert talk.keeping.awaits_keeper(0.0)
    talk.keeping.handle(KEEPER, TierKeys(SPACE, b"k" * 16), 0.1)
    assert talk.keeping.awaits_keeper(0.1), "more may come"
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "pool", 8, [1]), 0.1)
    assert not talk.keeping.awaits_keeper(0.1)
    assert talk.keeping.tier._known == {b"k" * 16}


def test_a_keeper_that_refuses_is_not_waited_for() -> None:
    talk = Talk()
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "", 0, [], "no room"), 0.1)
    assert not talk.keeping.awaits_keeper(0.1)


@pytest.mark.parametrize("keepers", [0, 1], ids=["dead", "silent"])
def test_no_keeper_keeps_an_engine_away_for_more_than_a_few_seconds(keepers: int) -> None:
    talk = Talk(keepers)
    assert talk.keeping.awaits_keeper(KEEPER_SECONDS - 0.1)
    assert not talk.keeping.awaits_keeper(KEEPER_SECONDS)
    talk.keeping._find(OPEN_SECONDS)
    assert len(talk.said) == 2 * keepers, "a silent one is asked again"
    talk.keeping.peers_gone({})
    assert not talk.keeping.awaits_keeper(100.0), "nor later"


def test_an_engine_says_once_that_there_is_no_keeper_on_its_host() -> None:
    talk = Talk(keepers=0)
    for now in (KEEPER_SECONDS - 0.1, KEEPER_SECONDS, 100.0):
        talk.keeping._find(now)
    (said,) = talk.log
    assert "no keeper on this host (host)" in said
    assert "penstock serve" in said


def test_a_worker_with_other_weights_finds_nothing_of_the_one_before() -> None:
    talk = Talk()
    tier = talk.keeping.tier
    talk.keeping.handle(KEEPER, TierKeys(SPACE, b"k" * 16), 0.1)
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "pool", 8, [1]), 0.1)
    same: Any = SimpleNamespace(kv_space=SPACE, kv_slot_bytes=64, kv_piece_bytes=0)
    talk.keeping.attached(same, 1.0)
    assert tier._known
    other: Any = SimpleNamespace(kv_space=b"t" * 16, kv_slot_bytes=128, kv_piece_bytes=0)
    talk.keeping.attached(other, 2.0)
    assert (tier._known, tier.is_open) == (set(), False)
    asked = talk.said[-1]
    assert isinstance(asked, TierOpen)
    assert (asked.space, asked.slot_bytes) == (b"t" * 16, 128)
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "pool", 8, [2]), 2.1)
    assert not tier.is_open, "that was the answer to an older question"
    talk.keeping.handle(KEEPER, TierOpened(b"t" * 16, "pool", 8, [3]), 2.2)
    assert tier.is_open


def test_a_scheduler_that_its_keeper_does_not_know_any_more_opens_anew() -> None:
    talk = Talk()
    talk.keeping.handle(KEEPER, TierKeys(SPACE, b"k" * 16), 0.1)
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "pool", 8, [1]), 0.1)
    talk.keeping.handle(KEEPER, TierOpened(b"", "", 0, []), 10.0)
    assert not talk.keeping.tier._known
    talk.keeping._find(10.0)
    first, second = talk.said
    assert isinstance(first, TierOpen)
    assert second == first
    talk.keeping.handle(KEEPER, TierOpened(SPACE, "pool", 8, [2]), 10.1)
    assert talk.keeping.tier.is_open
