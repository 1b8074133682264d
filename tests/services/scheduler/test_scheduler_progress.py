"""How far a request is, for who asks while it waits or runs."""

from __future__ import annotations

import msgspec
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.protocol.wire.messages.administration import (
    REQUEST_PROGRESS,
    Ask,
    EngineProgress,
)
from penstock.services.scheduler.progress import told


def asked(engine: Engine, request_id: int) -> EngineProgress:
    found = engine.core.progress(request_id)
    assert found is not None
    return found


def test_a_long_prompt_is_told_chunk_by_chunk_before_its_first_token() -> None:
    engine = Engine(max_in_flight=1)
    engine.now = 5.0
    engine.submit(7, prompt(150), age=1.5)
    found = asked(engine, 7)
    assert (found.to_prefill, found.queued_s, found.waits_for, found.ahead) == (150, -1, "slot", 0)
    left = []
    while (found := asked(engine, 7)).to_prefill:
        engine.plan()
        engine.deliver()
        left.append(asked(engine, 7).to_prefill)
    assert left == [86, 22, 0]
    assert (found.queued_s, found.waits_for, found.ahead) == (1.5, "", -1)
    engine.run()
    assert engine.core.progress(7) is None


def test_what_the_cache_held_is_told_until_there_is_a_token() -> None:
    engine = Engine(max_in_flight=1)
    engine.submit(1, prompt(40))
    engine.run()
    engine.now = 1.0
    engine.submit(2, [*prompt(40), *prompt(100, 50)])
    engine.plan()
    found = asked(engine, 2)
    assert (found.cached, found.to_prefill) == (40, 36)
    while engine.core.progress(2) and not engine.streams[2, 0].received:
        engine.step()
    assert asked(engine, 2).cached == 0


def test_the_place_is_that_of_the_policy_and_not_of_the_arrival() -> None:
    engine = Engine(small(max_num_seqs=1), policy="priority")
    engine.now = 1.0
    engine.submit(1, prompt(8))
    engine.step()
    for number, priority in ((2, 5), (3, 0), (4, 2)):
        engine.submit(number, prompt(8), priority=priority, n=2)
    assert [asked(engine, number).ahead for number in (1, 2, 3, 4)] == [-1, 4, 0, 2]


def test_tenants_are_counted_as_if_they_took_turns() -> None:
    engine = Engine(small(max_num_seqs=1), policy="fair")
    engine.now = 1.0
    engine.submit(1, prompt(8), tenant="ann")
    engine.step()
    for number, tenant in ((5, "bob"), (2, "ann"), (3, "ann"), (4, "ann")):
        engine.submit(number, prompt(8), tenant=tenant)
    order = sorted((2, 3, 4, 5), key=lambda number: asked(engine, number).ahead)
    places = [asked(engine, number).ahead for number in order]
    engine.run()
    assert places == [0, 1, 2, 3]
    assert order == engine.started[1:]


def test_a_preemption_is_told_before_the_end() -> None:
    engine = Engine(small(num_blocks=10), max_in_flight=1)
    engine.now = 1.0
    for number in (1, 2):
        engine.submit(number, prompt(12, number), max_tokens=20)
    while not asked(engine, 2).preemptions:
        engine.step()
    found = asked(engine, 2)
    assert (found.preemptions, found.waits_for, found.ahead) == (1, "slot", 0)
    assert found.to_prefill == 12  # it is computed anew
    assert found.queued_s == 0.0  # it did begin
    engine.run()
    assert engine.core.counters.preemptions


def test_an_engine_answers_with_what_is_open_and_to_nonsense_with_nothing() -> None:
    engine = Engine()
    engine.submit(3, prompt(8))
    ask = Ask("", 9, REQUEST_PROGRESS, msgspec.msgpack.encode([2, 3]))
    answer = told(ask, engine.core.progress)
    (found,) = msgspec.msgpack.decode(answer.answer, type=list[EngineProgress])
    assert (answer.number, found.id) == (9, 3)
    assert told(ask, None).answer == b""
    assert told(Ask("", 9, REQUEST_PROGRESS, b"\xc1"), engine.core.progress).answer == b""
