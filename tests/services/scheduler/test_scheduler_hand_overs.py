"""When a prefill engine hands a request over, and when it goes on with it itself."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from support.scheduler.kept_engine import Keeper, KeptEngine
from support.scheduler.scheduler_harness import prompt, small

from penstock.protocol.process.metrics import Registry
from penstock.protocol.process.participant import Ended
from penstock.protocol.wire.messages.engine import Adapter
from penstock.protocol.wire.messages.hand_overs import DecodeRoom
from penstock.protocol.wire.messages.kv_tier import TierKeys, TierStored, joined, split
from penstock.protocol.wire.messages.membership import Capacity, Identity
from penstock.services.scheduler.hand_overs import (
    CLAIM_SECONDS,
    MOST_HAND_OVERS,
    HandOvers,
    check_role,
)
from penstock.services.scheduler.kv_tier import AHEAD
from penstock.services.scheduler.meters import EngineMeters

HOST = "host"
OTHER = 2
"""Incarnation of the engine beside it."""
OUTPUT = 30


class TellingKeeper(Keeper):
    """It tells of what is stored, unless ``is_silent``."""

    is_silent = False

    def answer(self, message: Any) -> Any:
        answer = super().answer(message)
        if isinstance(message, TierStored) and not self.is_silent:
            self.news = [*getattr(self, "news", []), *split(message.keys)]
        return answer


class PrefillEngine(KeptEngine):
    """A prefill engine among others, which the test names."""

    def __init__(
        self, keeper: TellingKeeper | None = None, piece_bytes: int = 0, **others: Any
    ) -> None:
        """others: what the other engine is like, see ``other``; ``alone``: there is none."""
        self.told = keeper or TellingKeeper()
        super().__init__(small(num_blocks=64), self.told, AHEAD, piece_bytes)
        self.others = [] if others.pop("alone", False) else [other(**others)]
        service: Any = SimpleNamespace(
            participant=SimpleNamespace(of=lambda *_, **__: self.others, peers={OTHER: None}),
            config=SimpleNamespace(cluster=SimpleNamespace(max_local_prefill_length=0)),
            identity=lambda: Identity(1, HOST, "0", role="prefill"),
        )
        self.hand_overs = HandOvers(service, self.tier, self.core.prefill_budget)
        EngineMeters(Registry(), "").follow(self.core, self.hand_overs.had_first_token)
        self.let_go: list[int] = []
        self.ledger: Any = SimpleNamespace(hand_over=self._hand_over)

    def _hand_over(self, numbers: frozenset[int], *, prefilled: bool) -> None:
        assert prefilled
        for number in sorted(numbers):
            self.let_go.append(number)
            self.cancel(number)

    def step(self) -> None:
        super().step()
        if news := getattr(self.told, "news", []):
            self.told.news = []
            self.tier.take(TierKeys(self.tier.space, joined(news)), self.now)
        self.hand_overs.send(self.ledger, self.now)


@pytest.fixture(autouse=True)
def _on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: HOST)


def other(
    role: Any = "decode",
    host: str = HOST,
    longest: int = 60,
    engine: str = "1",
    *,
    repeats: bool = False,
    adapters: Sequence[Adapter] = (),
) -> Any:
    identity = Identity(2, host, engine, role=role)
    identity = Identity(2, host, engine, role=role)
    capacity = Capacity(
        256,
        4,
        8,
        max_model_len=longest,
        repeats=repeats,
        adapters=list(adapters),
    )
    return SimpleNamespace(identity=identity, capacity=capacity, incarnation=OTHER)


@pytest.mark.parametrize("piece_bytes", [0, 128], ids=["between_steps", "beside_steps"])
@pytest.mark.parametrize("n", [1, 3])
def test_a_request_is_handed_over_once_its_blocks_are_told_of(n: int, piece_bytes: int) -> None:
    engine = PrefillEngine(piece_bytes=piece_bytes)
    engine.submit(1, prompt(26), OUTPUT, n=n)
    engine.run()
    assert engine.let_go == [1]
    assert 0 < len(engine.tokens(1)) < OUTPUT, "it had tokens meanwhile"
    kept = KeptEngine(small(), engine.told)
    outputs = {choice: list(engine.tokens(1, choice)) for choice in range(n)}
    kept.submit(1, prompt(26), OUTPUT, outputs)
    kept.run()
    assert kept.core.counters.prefix_hit_tokens >= n * 24
    for choice in range(n):
        kept.assert_finished(1, choice)
    registry = Registry()
    engine.hand_overs.tick(registry)
    assert registry.counter("hand_overs_total").value == 1
    assert registry.counter("hand_over_bytes_total").value >= 6 * engine.tier.slot_bytes
    engine.assert_idle()


def test_a_soft_prompt_is_handed_over_with_the_blocks_of_its_virtual_tokens() -> None:
    engine = PrefillEngine(adapters=[Adapter("soft", "soft", 6)])
    engine.submit(1, prompt(20), OUTPUT, virtual=6)
    engine.run()
    assert engine.let_go == [1]
    kept = KeptEngine(small(), engine.told)
    kept.submit(1, prompt(20), OUTPUT, {0: list(engine.tokens(1))}, virtual=6)
    kept.run()
    kept.assert_finished(1)
    assert kept.core.counters.prefix_hit_tokens >= 24
    lacking = PrefillEngine(adapters=[Adapter("soft", "another digest", 6)])
    lacking.submit(1, prompt(20), OUTPUT, virtual=6)
    lacking.run()
    assert lacking.let_go == []


@pytest.mark.parametrize(
    "why",
    [
        {"alone": True}, {"role": "prefill"}, {"host": "another"}, {"longest": 40},
        {"engine": "0"},
    ],
    ids=str,
)  # fmt: skip
def test_nobody_who_can_go_on_with_it_leaves_it_where_it_is(why: dict[str, Any]) -> None:
    engine = PrefillEngine(**why)
    engine.submit(1, prompt(26), OUTPUT)
    engine.run()
    assert engine.let_go == []
    engine.assert_finished(1)


def _with_head(engine: PrefillEngine, **changes: int) -> None:
    """Another head for the request that was submitted."""
    request = engine.core._requests.get(1)
    assert request is not None
    request.head = msgspec.structs.replace(request.head, **changes)


def test_a_repeatable_request_stays_where_its_answer_repeats() -> None:
    engine = PrefillEngine()
    engine.submit(1, prompt(26), OUTPUT)
    _with_head(engine, deterministic=True)
    engine.run()
    assert engine.let_go == [], "the other engine refuses it"
    engine.assert_finished(1)
    repeating = PrefillEngine(repeats=True)
    repeating.submit(1, prompt(26), OUTPUT)
    _with_head(repeating, deterministic=True)
    repeating.run()
    assert repeating.let_go == [1]


@pytest.mark.parametrize("times", [1, MOST_HAND_OVERS - 1, MOST_HAND_OVERS])
def test_a_request_that_came_back_is_handed_over_again_but_not_for_ever(times: int) -> None:
    engine = PrefillEngine()
    engine.submit(1, prompt(26), OUTPUT)
    _with_head(engine, hand_overs=times)
    engine.run()
    if times < MOST_HAND_OVERS:
        assert engine.let_go == [1], "the engine that was lost is there again"
        return
    assert engine.let_go == [], "it may be what ends them"
    engine.assert_finished(1)


@pytest.mark.parametrize("room", [DecodeRoom(0, 900), DecodeRoom(2, 900), DecodeRoom(8, 7)])
def test_who_lacks_slots_or_blocks_for_a_request_is_not_given_it(room: DecodeRoom) -> None:
    engine = PrefillEngine()
    engine.hand_overs.told(OTHER, room)
    engine.submit(1, prompt(26), OUTPUT, n=3)
    for _ in range(8):
        engine.step()
    assert engine.let_go == []
    engine.hand_overs.told(OTHER, DecodeRoom(3, 20))
    engine.run()
    assert engine.let_go == [1], "it has room now"


def test_what_was_just_handed_over_counts_until_its_engine_can_have_said_so() -> None:
    engine = PrefillEngine()
    engine.hand_overs.told(OTHER, DecodeRoom(1, 900))
    engine.submit(1, prompt(26), OUTPUT)
    engine.submit(2, prompt(26, 40), OUTPUT)
    for _ in range(12):
        engine.step()
    assert engine.let_go == [1]
    engine.now += CLAIM_SECONDS
    engine.run()
    assert engine.let_go == [1, 2]


def test_what_the_keeper_has_lost_meanwhile_is_not_taken_for_kept() -> None:
    engine = PrefillEngine(alone=True)
    engine.submit(1, prompt(26), OUTPUT)
    for _ in range(8):
        engine.step()
    lost = list(engine.told.by_key)
    engine.tier.take(TierKeys(engine.tier.space, b"", joined(lost)), engine.now)
    engine.others = [other()]
    engine.run()
    assert engine.let_go == []
    engine.assert_finished(1)


@pytest.mark.parametrize("alone", [True, False])
def test_steps_are_not_shortened_for_streams_that_wait_for_their_hand_over(alone: bool) -> None:
    engine = PrefillEngine(alone=alone)
    engine.told.is_silent = True  # nothing is ready to be handed over
    budget = engine.core.prefill_budget
    for _ in range(50):
        budget.observe(1, 0, 0.5)
        budget.observe(1, 1000, 1.0)
    assert budget.most_tokens(1, 1) is not None
    engine.hand_overs.tick(Registry())
    assert (budget.most_tokens(1, 1) is None) != alone


def test_a_request_that_came_while_nobody_decoded_goes_on_with_who_comes_later() -> None:
    engine = PrefillEngine(alone=True)
    engine.submit(1, prompt(26), OUTPUT)
    for _ in range(8):
        engine.step()
    assert engine.let_go == []
    engine.others = [other()]
    engine.run()
    assert engine.let_go == [1]


def test_a_keeper_that_does_not_tell_or_is_gone_keeps_nobody_from_ending() -> None:
    keeper = TellingKeeper()
    keeper.is_silent = True
    silent = PrefillEngine(keeper)
    silent.submit(1, prompt(26), OUTPUT)
    silent.run()
    assert silent.let_go == []
    silent.assert_finished(1)
    gone = PrefillEngine()
    gone.submit(1, prompt(26), OUTPUT)
    gone.step()
    gone.tier.lost_keeper()
    gone.run()
    assert gone.let_go == []
    gone.assert_finished(1)


def test_blocks_for_which_the_keeper_has_no_room_are_not_computed_elsewhere() -> None:
    engine = PrefillEngine()
    engine.tier._stock.clear()
    engine.tier._stores.room = 0
    engine.submit(1, prompt(26), OUTPUT)
    engine.run()
    assert engine.let_go == []
    engine.assert_finished(1)


def test_what_is_about_to_end_ends_where_it_is() -> None:
    engine = PrefillEngine()
    engine.submit(1, prompt(26), 4)
    engine.run()
    assert engine.let_go == []
    engine.assert_finished(1)


def test_an_engine_loads_what_was_handed_over_whatever_it_measured() -> None:
    engine = PrefillEngine()
    engine.submit(1, prompt(26), OUTPUT)
    engine.run()
    decode = KeptEngine(small(), engine.told)
    decode.tier.rates.load = 1e9
    decode.tier.rates.pays = lambda blocks, rate: False  # type: ignore[method-assign]
    decode.submit(1, prompt(26), OUTPUT, {0: list(engine.tokens(1))})
    request = decode.core._requests.get(1)
    assert request is not None
    request.head = msgspec.structs.replace(request.head, hand_overs=1)
    decode.run()
    assert decode.tier.counters.hits >= 6
    decode.assert_finished(1)


def test_a_role_is_refused_where_the_worker_keeps_no_blocks() -> None:
    told: Any = SimpleNamespace(kv_space=b"")
    with pytest.raises(Ended, match="--kv-tier"):
        check_role("prefill", told)
    check_role("both", told)
