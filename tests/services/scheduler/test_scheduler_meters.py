"""What is counted of an engine's sequences and steps."""

from __future__ import annotations

import msgspec
from support.scheduler.scheduler_harness import Engine, prompt, small

from penstock.protocol.process.metrics import Registry
from penstock.services.scheduler.meters import EngineMeters


class Counted:
    """The series of an engine, by their names."""

    def __init__(self, engine: Engine) -> None:
        self._registry = Registry()
        EngineMeters(self._registry, "model").follow(engine.core)

    def number(self, name: str) -> int:
        return sum(self._registry.histogram(name).counts)

    def seconds(self, name: str) -> float:
        return self._registry.histogram(name).total


def test_a_request_is_told_of_when_it_starts_and_when_it_has_its_first_token() -> None:
    engine = Engine()
    counted = Counted(engine)
    engine.now = 100.0
    engine.submit(1, prompt(4), max_tokens=3, age=2.0)
    assert engine.plan() is not None
    assert (counted.number("request_queue_seconds"), counted.seconds("request_queue_seconds")) == (
        1,
        2.0,
    )
    assert counted.number("request_prefill_seconds") == 0
    engine.now = 105.0
    engine.deliver()
    assert counted.number("request_prefill_seconds") == 1
    assert counted.seconds("request_prefill_seconds") == 5.0
    engine.run()
    assert [counted.number(f"request_{part}_seconds") for part in ("queue", "prefill")] == [1, 1]
    assert counted.number("request_decode_seconds") == 1


def test_what_was_begun_elsewhere_counts_neither_as_queued_nor_as_prefilled() -> None:
    engine = Engine()
    counted = Counted(engine)
    engine.now = 100.0
    engine.submit(1, prompt(4), max_tokens=3, age=90.0, accepted=True)
    engine.run()
    engine.assert_finished(1)
    assert counted.number("request_queue_seconds") == 0
    assert counted.number("request_prefill_seconds") == 0
    assert counted.number("request_decode_seconds") == 1


def test_a_request_without_output_has_no_first_token() -> None:
    engine = Engine()
    counted = Counted(engine)
    engine.submit(1, prompt(10), max_tokens=0, prompt_logprobs=1)
    engine.run()
    assert counted.number("request_queue_seconds") == 1
    assert counted.number("request_prefill_seconds") == 0
    assert counted.number("request_decode_seconds") == 0


def test_a_preempted_sequence_counts_once() -> None:
    engine = Engine(small(num_blocks=8, max_num_seqs=2))
    counted = Counted(engine)
    engine.now = 100.0
    for number in (1, 2):
        engine.submit(number, prompt(4, start=number), max_tokens=25)
    engine.run()
    assert engine.core.counters.preemptions
    for part in ("queue", "prefill", "decode"):
        assert counted.number(f"request_{part}_seconds") == 2


def test_steps_whose_results_are_ignored_count_nowhere() -> None:
    engine = Engine()
    counted = Counted(engine)
    engine.submit(1, prompt(4), max_tokens=1)
    engine.plan()
    answer = engine.answers[0]
    engine.core.apply(msgspec.structs.replace(answer, epoch=answer.epoch + 1), engine.now)
    engine.run()
    assert engine.core.counters.ignored_results == 1
    steps = [counted.number(f"step_{what}") for what in ("seconds", "sequences", "tokens")]
    assert steps == [engine.core.counters.steps] * 3
