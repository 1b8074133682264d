"""How old the queue of an engine is."""

from __future__ import annotations

import pytest
from support.scheduler.scheduler_harness import Engine, prompt, small


@pytest.mark.parametrize("policy", ["fcfs", "priority", "sjf", "fair"])
def test_the_queue_is_as_old_as_the_oldest_request_that_was_never_started(policy: str) -> None:
    engine = Engine(small(max_num_seqs=1), policy=policy)
    assert engine.core.queue_age(engine.now) == 0
    engine.submit(1, prompt(4), max_tokens=20)
    engine.step()
    assert engine.started == [1]
    engine.now = 10.0
    assert engine.core.queue_age(engine.now) == 0, "nothing waits"
    engine.submit(2, prompt(4), max_tokens=20, age=3.0, tenant="late")
    engine.submit(3, prompt(8), max_tokens=20, age=1.0, tenant="later")
    assert engine.core.queue_age(engine.now) == 3, "counted from the arrival at the frontend"
    engine.now = 12.0
    assert engine.core.queue_age(engine.now) == 5
    engine.cancel(2)
    assert engine.core.queue_age(engine.now) == 3
    while 3 not in engine.started:
        engine.step()
    assert engine.core.queue_age(engine.now) == 0


def test_what_has_run_before_does_not_make_the_queue_old() -> None:
    """It waits for its place again because memory is short, not because the engine is behind."""
    engine = Engine(small(num_blocks=8, max_num_seqs=2))
    for number in (1, 2):
        engine.submit(number, prompt(4, start=number), max_tokens=25)
    while engine.core.counters.preemptions == 0:
        engine.now += 1.0
        engine.step()
    assert engine.core.stats().waiting == 1
    assert engine.core.queue_age(engine.now) == 0
