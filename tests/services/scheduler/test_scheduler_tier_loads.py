"""Loads of kept blocks: shared, in parts, with little room, and beside stores."""

from __future__ import annotations

import pytest
from support.scheduler.kept_engine import Keeper, KeptEngine
from support.scheduler.scheduler_harness import prompt, small

from penstock.protocol.wire.codec import Message
from penstock.protocol.wire.messages.kv_tier import KVCopied, KVCopies, TierGot
from penstock.services.scheduler.kv_prefix import Prefix

LIMITS = small(num_blocks=12, max_model_len=44)
"""Room for one prompt of 40 tokens."""


def kept_by_another(length: int, start: int = 0) -> Keeper:
    """A keeper that has a prompt."""
    keeper = Keeper()
    first = KeptEngine(small(num_blocks=32, max_model_len=100), keeper, after=1)
    first.submit(1, prompt(length, start), 2)
    first.run()
    return keeper


def test_blocks_that_are_distrusted_while_they_are_copied_are_not_kept() -> None:
    engine = KeptEngine(LIMITS, Keeper(), after=1)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    engine.run()
    (storing,) = engine.tier._storing.values()
    names = list(storing.slots)
    engine.tier.distrust(names[3:5])
    engine.silent = False
    engine.plan()
    assert [name in engine.keeper.by_key for name in names] == 3 * [True] + 2 * [False] + 3 * [True]


def test_blocks_that_are_distrusted_while_they_are_loaded_are_not_found() -> None:
    keeper = kept_by_another(40)
    engine = KeptEngine(LIMITS, keeper)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    assert engine.plan() is None
    (load,) = engine.tier._loads.all()
    engine.tier.distrust(load.names[4:])
    engine.silent = False
    engine.run()
    assert engine.streams[1, 0].cached == 4 * 4


def test_prompts_with_a_common_beginning_each_load_all_that_is_kept_of_them() -> None:
    keeper, shared = Keeper(), prompt(16)
    first = KeptEngine(small(num_blocks=64, max_model_len=100), keeper, after=1)
    prompts = [shared + prompt(20, 30 * number) for number in range(1, 4)]
    for number, one in enumerate([shared + prompt(1, 50), *prompts]):
        first.submit(number + 1, one, 2)
    first.run()
    engine = KeptEngine(small(num_blocks=64, max_model_len=100), keeper, after=1)
    engine.submit(1, shared + prompt(1, 50), 2)
    for number, one in enumerate(prompts):
        engine.submit(number + 2, one, 2)
    engine.run()
    assert [engine.streams[number, 0].cached for number in range(1, 5)] == [16, 32, 32, 32]
    assert engine.tier.counters.failed_loads == 0


def test_loads_wait_for_room_in_their_rank() -> None:
    keeper = Keeper()
    for number in range(6):
        first = KeptEngine(LIMITS, keeper, after=1)
        first.submit(1, prompt(40, 15 * number), 2)
        first.run()
    engine = KeptEngine(small(num_blocks=24, max_model_len=44), keeper)
    for number in range(6):
        engine.submit(number + 1, prompt(40, 15 * number), 2)
    engine.run()
    assert engine.tier.counters.failed_loads == 0
    assert [engine.streams[number, 0].cached for number in range(1, 7)] == 6 * [36]
    assert engine.started == [1, 2, 3, 4, 5, 6]


def test_a_prefix_that_the_keeper_gives_in_parts_is_loaded_whole() -> None:
    keeper = kept_by_another(80)
    answer = keeper.answer

    def in_parts(message: Message) -> Message | None:
        made = answer(message)
        return TierGot(made.number, made.slots[:8]) if isinstance(made, TierGot) else made

    setattr(keeper, "answer", in_parts)  # noqa: B010 - its pool has room for eight
    engine = KeptEngine(small(num_blocks=32, max_model_len=100), keeper)
    engine.submit(1, prompt(80), 2)
    engine.run()
    assert engine.streams[1, 0].cached == 76
    assert engine.tier.counters.loads == 3


def test_what_is_being_stored_is_waited_for_and_then_loaded() -> None:
    engine = KeptEngine(LIMITS, Keeper(), after=1)
    engine.silent = True
    engine.submit(1, prompt(40), 2)
    engine.run()
    engine.submit(2, prompt(40, 50), 2)
    engine.run()
    engine.submit(3, prompt(40), 2)
    assert engine.plan() is None
    engine.silent = False
    engine.run()
    assert engine.streams[3, 0].cached == 36
    assert engine.now == 0, "it did not wait longer than that"


def test_small_loads_say_little_about_what_large_ones_take() -> None:
    engine = KeptEngine(LIMITS, kept_by_another(40))
    tier, copied = engine.tier, engine._copied

    def slowly(copies: KVCopies) -> KVCopied | None:
        engine.now += 0.1
        return copied(copies)

    setattr(engine, "_copied", slowly)  # noqa: B010 - the latency of a load
    tier._piece = 100
    engine.submit(1, prompt(40), 2)
    engine.run()
    assert tier.counters.hits == 9
    assert tier.rates.load == 0, "not known yet"
    for done in (9, 100):
        tier._piece, tier.rates.load = 100, 1e-6
        names = [bytes([number]) * 16 for number in range(done)]
        load = tier._loads.begin(names, Prefix(0, []), done, engine.now)
        load.asked_at = engine.now
        engine.now += 0.1
        load.slots, load.asked = list(range(done)), done
        tier._copied(load, KVCopied(1, load.number, done, 0.1), engine.now)
        assert 1e-6 < tier.rates.load < 5e-6


def test_loads_that_are_under_way_at_a_time_share_their_time() -> None:
    rates = KeptEngine(LIMITS, kept_by_another(4)).tier.rates
    rates.slot_bytes = 1
    for number in range(50):
        rates.loaded(10, 0.0, 1.0 + 0.1 * number, 1)
    assert rates.load == pytest.approx(0.01, rel=0.01), "and not as long as each has waited"
