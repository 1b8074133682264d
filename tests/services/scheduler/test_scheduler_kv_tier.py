"""Blocks that are kept outside of KV memory: found, loaded, and never wrong."""

from __future__ import annotations

import random

import pytest
from support.scheduler.kept_engine import Keeper, KeptEngine
from support.scheduler.scheduler_harness import prompt, small

from penstock.protocol.wire.messages.cache_hints import RetainedSpan
from penstock.protocol.wire.messages.kv_tier import (
    STORES_AT_A_TIME,
    URGENT_STORES,
    TierKeys,
)
from penstock.services.scheduler.cache_shares import CacheShares
from penstock.services.scheduler.circuit_breaker import MOST_FAILURES, PAUSE_SECONDS
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.tier_rates import LEAST_WAIT_SECONDS

LIMITS = small(num_blocks=12, max_model_len=44)
"""Room for one prompt of 40 tokens."""
TICK = 0.25
BLOCK_BYTES = 64
"""Of a slot."""


def ask_in_turn(engine: KeptEngine, rounds: int, first_id: int = 1, **more: str) -> None:
    """Three prompts that drive each other out of KV memory."""
    for number in range(3 * rounds):
        request = first_id + number
        assert engine.submit(request, prompt(40, 7 * (number % 3)), 2, **more) is None
        engine.run()
        engine.end(request)


def test_what_two_prompts_had_is_found_again_after_its_eviction() -> None:
    engine = KeptEngine(LIMITS, Keeper())
    ask_in_turn(engine, 3)
    assert engine.core.counters.prefix_hit_tokens == 3 * 36
    assert engine.tier.counters.hits == 3 * 9
    assert engine.tier.counters.failed_loads == 0


def test_a_first_prompt_is_kept_at_once_where_that_is_wanted() -> None:
    engine = KeptEngine(LIMITS, Keeper(), after=1)
    ask_in_turn(engine, 2)
    assert engine.tier.counters.hits == 3 * 9


def test_prompts_that_come_once_cost_no_copy_and_no_message() -> None:
    engine = KeptEngine(LIMITS, Keeper())
    said = len(engine.keeper.slots)
    for number in range(10):
        engine.submit(number + 1, prompt(40, 5 * number), 2)
        engine.run()
    assert not engine.copies
    assert len(engine.keeper.slots) == said
    assert engine.tier.counters.loads == 0


@pytest.mark.parametrize(("share", "stored"), [(1.0, 10), (0.25, 3), (0.0, 0)])
def test_what_is_retained_of_a_first_prompt_is_stored_and_the_rest_by_the_rule(
    share: float, stored: int
) -> None:
    engine = KeptEngine(LIMITS, Keeper(), shares=CacheShares(share))
    for number in range(2):
        engine.submit(number, prompt(40), 2, retain=[RetainedSpan(40, 300)])
        engine.run()
        assert len(engine.keeper.by_key) == (9 if number and stored < 9 else stored)


@pytest.mark.parametrize("length", [9, 40])
def test_short_prompts_and_those_in_chunks_are_both_found_by_another_engine(length: int) -> None:
    keeper = Keeper()
    first = KeptEngine(small(max_num_batched_tokens=8), keeper, after=1)
    first.submit(1, prompt(length), 4)
    first.run()
    second = KeptEngine(small(), keeper, after=1)
    second.submit(1, prompt(length), 4)
    second.run()
    assert second.tokens(1) == first.tokens(1)
    assert second.streams[1, 0].cached == (length - 1) // 4 * 4


def test_a_salted_prompt_is_not_found_without_its_salt() -> None:
    keeper = Keeper()
    engine = KeptEngine(LIMITS, keeper, after=1)
    ask_in_turn(engine, 1, cache_salt="one")
    other = KeptEngine(LIMITS, keeper, after=1)
    ask_in_turn(other, 1)
    ask_in_turn(other, 1, first_id=50, cache_salt="two")
    assert other.tier.counters.hits == 0
    ask_in_turn(other, 1, first_id=90, cache_salt="one")
    assert other.tier.counters.hits == 3 * 9


def test_a_preempted_sequence_takes_its_blocks_from_the_keeper() -> None:
    engine = KeptEngine(small(num_blocks=14, max_model_len=48), Keeper())
    for request in range(1, 4):
        engine.submit(request, prompt(8, 11 * request), 36)
    engine.run()
    assert engine.core.counters.preemptions
    assert engine.tier.counters.stored
    assert engine.tier.counters.hits
    assert all(len(engine.tokens(request)) == 36 for request in range(1, 4))


def test_the_choices_of_a_request_wait_for_one_load() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(small(), keeper)
    engine.submit(1, prompt(40), 2, n=4)
    engine.run()
    assert engine.tier.counters.loads == 1
    assert engine.core.counters.prefix_hit_tokens == 4 * 36


def test_a_damaged_block_is_noticed_and_what_follows_it_computed() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    for slot, (key, content) in list(keeper.slots.items())[4:6]:
        keeper.slots[slot] = key[:-1] + b"?", content
    engine = KeptEngine(LIMITS, keeper)
    ask_in_turn(engine, 1)
    assert engine.tier.counters.corrupted == 1
    assert 0 < engine.tier.counters.hits < 3 * 9


def test_others_go_on_while_a_load_lasts_and_it_is_not_waited_for_for_ever() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(small(), keeper)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    assert engine.plan() is None
    engine.submit(2, prompt(20, 50), 2)
    while engine.plan() is not None:
        pass
    assert engine.started == [2]
    engine.run()
    assert engine.end(1)
    assert engine.now > 0
    assert engine.streams[1, 0].cached == 0


def seconds_until_end(engine: KeptEngine, request: int, start: int) -> float:
    """Ask for a prompt; time passes only while nothing can run."""
    began = engine.now
    assert engine.submit(request, prompt(40, start), 2) is None
    while engine.streams[request, 0].open:
        engine.step()
        if not engine.answers and engine.plan() is None:
            engine.now += TICK
            engine.expire()
            engine.tier.tick(engine.now)
            assert engine.now < began + 100, "it waits for ever"
    assert engine.end(request)
    return engine.now - began


def engine_with_kept_prompts(limits: Limits, count: int) -> KeptEngine:
    """Prompts that begin with 0, 50, … are kept; how long a prefill lasts is known."""
    keeper = Keeper()
    first = KeptEngine(LIMITS, keeper, after=1)
    for number in range(count):
        first.submit(number + 1, prompt(40, 50 * number), 2)
        first.run()
    engine = KeptEngine(limits, keeper)
    engine.core.prefill_budget.observe(0, 1000, 1e-3)
    return engine


@pytest.mark.parametrize("who", ["silent", "worker_silent"])
def test_loads_that_come_too_late_delay_nobody_for_longer_than_their_own_wait(who: str) -> None:
    engine = engine_with_kept_prompts(small(num_blocks=24, max_model_len=44), 6)
    setattr(engine, who, True)
    waits = []
    for number in range(6):
        waits.append(seconds_until_end(engine, number + 1, 50 * number))
        engine.core.check()
    assert max(waits) <= LEAST_WAIT_SECONDS + 2 * TICK, f"{waits}"
    assert max(waits[2:]) <= TICK, "two were late: the keeper is not asked for a while"
    assert len(engine.tier._loads) == 0
    setattr(engine, who, False)
    engine.answers_late.clear()
    engine.now += PAUSE_SECONDS
    assert engine.tier.counters.hits == 0
    for number in range(12):  # they are computed for a while, as what takes too long to load is
        seconds_until_end(engine, 100 + number, 50 * (number % 6))
    assert engine.tier.counters.slow
    assert engine.tier.counters.hits, "it is asked again"


@pytest.mark.parametrize("fault", ["empty", "not copied"])
def test_a_request_whose_load_fails_is_computed_at_once(fault: str) -> None:
    count = MOST_FAILURES + 4
    engine = engine_with_kept_prompts(LIMITS, count)
    if fault == "empty":
        engine.keeper.by_key.clear()
    else:
        engine.keeper_gone = True
    waits = [seconds_until_end(engine, number + 1, 50 * number) for number in range(count)]
    assert max(waits) <= TICK, f"{waits}"
    assert engine.tier.counters.hits == 0
    assert engine.tier.counters.loads == MOST_FAILURES, "then it is not asked for a while"


def test_who_joins_a_load_waits_no_longer_than_who_began_it() -> None:
    engine = engine_with_kept_prompts(small(), 1)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    assert engine.plan() is None
    engine.now += LEAST_WAIT_SECONDS - TICK
    engine.submit(2, prompt(40), 2)
    assert engine.plan() is None
    engine.now += TICK
    while engine.plan() is not None:
        pass
    assert engine.started == [1, 2]


def test_a_load_behind_others_is_waited_for_as_long_as_all_of_them_may_take() -> None:
    engine = engine_with_kept_prompts(small(num_blocks=64), 4)
    engine.core.prefill_budget.observe(0, 1000, 1e-3)
    engine.core.prefill_budget._token_seconds = LEAST_WAIT_SECONDS / 80
    engine.silent = True
    for number in range(4):
        engine.submit(number + 1, prompt(40, 50 * number), 2)
    assert engine.plan() is None
    waits = [load.until - engine.now for load in engine.tier._loads.all()]
    one = 2 * 9 * 4 * LEAST_WAIT_SECONDS / 80
    assert waits == pytest.approx([LEAST_WAIT_SECONDS, 2 * one, 3 * one, 4 * one])


def test_a_keeper_that_is_lost_costs_what_it_had_and_nothing_else() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(LIMITS, keeper)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    assert engine.plan() is None
    engine.tier.lost_keeper()
    engine.core.check()
    engine.answers_late.clear()
    engine.silent = False
    engine.run()
    assert engine.end(1)
    assert engine.now == 0, "it did not wait"
    engine.keeper = Keeper()
    engine.open()
    ask_in_turn(engine, 3, first_id=100)
    assert engine.tier.counters.hits


def test_blocks_that_the_keeper_has_dropped_are_not_asked_for() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(LIMITS, keeper)
    engine.tier.take(TierKeys(engine.tier.space, b"", b"".join(keeper.by_key)), 0.0)
    ask_in_turn(engine, 1)
    assert engine.tier.counters.loads == 0


def test_what_is_slower_to_load_than_to_compute_is_computed() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(LIMITS, keeper)
    engine.core.prefill_budget.observe(0, 1000, 1e-5)
    engine.tier.rates.load = 1.0
    ask_in_turn(engine, 1)
    assert engine.tier.counters.slow == 3
    assert engine.tier.counters.loads == 0
    assert engine.tier.rates.load < 1.0, "it is to be measured again one day"


@pytest.mark.parametrize("seed", range(12))
def test_tokens_are_right_whatever_happens(seed: int) -> None:
    chance = random.Random(seed)
    keeper = Keeper()
    limits = small(num_blocks=20, max_model_len=56)
    engine = KeptEngine(limits, keeper, chance.choice((1, 2)), piece_bytes=seed % 2 << 20)
    for request in range(1, 60):
        engine.tier._piece = chance.choice((1, 3, 1000))
        engine.parts = chance.choice((0, 1, 4))
        start = 13 * chance.randrange(4)
        engine.submit(
            request, prompt(chance.randrange(3, 44), start), chance.randrange(1, 12),
            n=chance.choice((1, 1, 3)), cache_salt=chance.choice(("", "", "salt")),
        )  # fmt: skip
        for _ in range(chance.randrange(6)):
            engine.silent = chance.random() < 0.3
            engine.step()
        engine.silent = False
        match chance.randrange(24):
            case 0:
                engine.restart()
            case 1:
                engine.cancel(request)
            case 2:
                engine.tier.lost_keeper()
                engine.answers_late.clear()
                engine.open()
            case 3:
                engine.worker.fail_steps[engine.worker._expected] = "as told"
            case 4 if keeper.slots:
                slot = chance.choice(list(keeper.slots))
                keeper.slots[slot] = b"?" * 16, keeper.slots[slot][1]
            case _:
                pass
    engine.run()
    assert not engine.core.stats().blocks_used
    assert len(engine.tier._loads) == 0


def test_a_load_beside_steps_that_nobody_waits_for_writes_into_no_block_of_others() -> None:
    keeper = Keeper()
    ask_in_turn(KeptEngine(LIMITS, keeper, after=1), 1)
    engine = KeptEngine(LIMITS, keeper, piece_bytes=1 << 20)
    engine.submit(1, prompt(40), 2)
    for _ in range(2):  # the keeper answers, then the worker is told
        assert engine.plan() is None
    engine.silent = True
    load = next(iter(engine.tier._loads.all()))
    assert load.asked == 9, "all at once"
    engine.cancel(1)
    engine.tier.tick(engine.now)
    engine.submit(2, prompt(40, 50), 2)
    while engine.plan() is not None:
        pass
    assert not engine.under_way
    engine.silent = False
    engine.run()
    assert engine.end(2)


def test_few_blocks_are_copied_ahead_of_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = KeptEngine(small(num_blocks=12, max_model_len=47), Keeper(), after=1)
    monkeypatch.setattr(engine.tier, "after_step", lambda: None)
    engine.tier._stores.most_urgent = 1
    for request in range(1, 9):
        engine.submit(request, prompt(40, 100 * request), 1)
    engine.run()
    stored = [copies for copies in engine.copies if copies.store]
    assert {len(copies.blocks) for copies in stored} == {1}
    assert engine.tier._stores.missed


def test_stores_beside_steps_keep_up_with_steps_that_last_as_long() -> None:
    engine = KeptEngine(
        small(num_blocks=24, max_model_len=44, max_num_batched_tokens=32),
        Keeper(), after=1, piece_bytes=2 * BLOCK_BYTES,
    )  # fmt: skip
    for request in range(1, 13):
        engine.submit(request, prompt(40, 100 * request), 1)
    engine.run()
    for _ in range(4):
        engine.plan()
    stored = [copies for copies in engine.copies if copies.store]
    assert {len(copies.blocks) for copies in stored} <= {1, 2}
    assert engine.tier._stores.missed == 0
    assert engine.tier.counters.stored == 12 * 10


@pytest.mark.parametrize(("piece", "messages"), [(0, 1), (2, STORES_AT_A_TIME)])
def test_few_stores_are_under_way_at_a_time(piece: int, messages: int) -> None:
    engine = KeptEngine(small(num_blocks=40), Keeper(), after=1, piece_bytes=piece * BLOCK_BYTES)
    engine.worker_silent = True
    assert engine.submit(1, prompt(40), 2) is None
    engine.run()
    engine.plan()
    assert len(engine.copies) == messages


def test_blocks_that_several_steps_overwrite_share_the_room_beside_steps() -> None:
    engine = KeptEngine(
        small(num_blocks=12, max_model_len=47), Keeper(), after=1, piece_bytes=BLOCK_BYTES
    )
    engine.worker_silent = True
    for request in range(1, 9):
        engine.submit(request, prompt(40, 100 * request), 1)
    engine.run()
    assert sum(len(copies.blocks) for copies in engine.copies) == STORES_AT_A_TIME + URGENT_STORES
    assert engine.tier._stores.missed


def test_a_load_overwrites_no_block_that_is_still_to_be_stored() -> None:
    keeper = Keeper()
    kept, other = prompt(36), prompt(40, 50)
    first = KeptEngine(LIMITS, keeper, after=1)
    first.submit(1, kept, 2)
    first.run()
    engine = KeptEngine(LIMITS, keeper, after=1)
    engine.tier._piece = 1
    engine.submit(1, other, 2)
    engine.silent = True
    engine.run()
    engine.submit(2, kept, 2)
    assert engine.plan() is None
    engine.tier._piece = 100
    engine.answers_late.reverse()  # the keeper answers while the first block is being stored
    engine.silent = False
    engine.run()
    assert engine.tier.counters.hits
    again = KeptEngine(LIMITS, keeper, after=1)
    again.submit(1, other, 2)
    again.run()
    assert again.tier.counters.hits
    assert again.tokens(1) == engine.tokens(1)


def test_a_keeper_that_is_lost_is_not_given_what_was_urgent_before() -> None:
    engine = KeptEngine(LIMITS, Keeper(), after=1)
    engine.tier._stores.urgent.append((b"u" * 16, 0))
    engine.tier.lost_keeper()
    engine.tier.before_plan()
    assert not engine.tier._storing
    engine.open()
    engine.tier._stock.clear()
    engine.tier._stores.room = 0
    engine.tier._stores.urgent.append((b"u" * 16, 0))
    engine.tier.before_plan()
    assert not engine.tier._storing


def test_what_cannot_be_stored_is_not_remembered_for_ever() -> None:
    engine = KeptEngine(LIMITS, Keeper(), after=1)
    engine.tier._stock.clear()
    engine.tier._stores.room = 0
    ask_in_turn(engine, 4)
    assert len(engine.tier._stores) <= LIMITS.num_blocks
    engine.tier.lost_keeper()
    ask_in_turn(engine, 1, first_id=50)
    assert len(engine.tier._stores) == 0
