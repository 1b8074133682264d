"""An engine of several stages: micro-batches take turns to decode, so that no stage waits for the
tokens of a step that another one has under way."""

from __future__ import annotations

import random

import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.services.scheduler.limits import Limits


def limits(num_blocks: int = 60) -> Limits:
    return small(num_blocks=num_blocks, max_num_seqs=6, max_num_batched_tokens=32, micro_batches=3)


def decoding(engine: Engine) -> list[set[int]]:
    """The slots of each micro-batch."""
    slots = {slot for slot, state in engine.worker.slots.items() if state.decoding}
    return [{slot for slot in slots if slot % 3 == number} for number in range(3)]


def test_plans_that_are_in_flight_together_decode_different_sequences() -> None:
    engine = Engine(limits())
    for number in range(6):
        engine.submit(number, prompt(5, 7 * number), 30)
    for _ in range(6):
        engine.step()
    assert [len(slots) for slots in decoding(engine)] == [2, 2, 2], "slots are taken evenly"
    while engine.answers:
        engine.deliver()
    turns = []
    while (plan := engine.plan()) is not None:
        turns.append(plan.micro_batch)
    assert len(turns) == 4, "one more than stages, so that the first always finds one"
    assert len(set(turns[:3])) == 3 and turns[3] == turns[0]
    assert [len(answer.tokens) // 4 for answer in engine.answers] == [2] * 4
    engine.run()
    assert all(stream.end for stream in engine.streams.values())


def test_a_sequence_alone_decodes_in_every_step() -> None:
    engine = Engine(limits())
    engine.submit(1, prompt(5), 20)
    engine.run()
    assert len(engine.plans) <= 22 and len(engine.tokens(1)) == 20


@pytest.mark.parametrize("seed", range(8))
def test_tokens_are_those_of_a_run_alone_whatever_comes_and_goes(seed: int) -> None:
    rng = random.Random(seed)
    engine = Engine(limits(rng.choice([16, 24, 60])))
    number = 0
    for _ in range(150):
        if rng.random() < 0.3:
            ids = prompt(rng.randint(1, 30), rng.randrange(9))
            engine.submit(number, ids, rng.randint(1, 12))
            number += 1
        if rng.random() < 0.6:
            engine.plan()
        if engine.answers and rng.random() < 0.5:
            engine.deliver()
        if number and rng.random() < 0.03:
            engine.cancel(rng.randrange(number))
    engine.run()
    assert not any(stream.open for stream in engine.streams.values())
