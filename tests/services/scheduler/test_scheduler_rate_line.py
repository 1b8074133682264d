"""What the log says of a busy engine, and that it says nothing of an idle one."""

from __future__ import annotations

from typing import Any

from penstock.services.scheduler.rate_line import RATE_SECONDS, RateLine
from penstock.services.scheduler.stats import Counters, SchedulerStats

TICK = 0.25


class Engine:
    """Counts as an engine does; its rate line is looked at with each tick."""

    def __init__(self) -> None:
        self.said: list[tuple[float, dict[str, Any]]] = []
        self.counters = Counters()
        self.now = 1000.0
        self._line = RateLine(lambda event, **fields: self.said.append((self.now, fields)))

    def tick(self, running: int = 0, waiting: int = 0, blocks: int = 0) -> None:
        self.now += TICK
        stats = SchedulerStats(
            *(running, waiting, {}, waiting, 0, running + waiting),
            *(200, blocks, 0, 0, 0, self.counters),
        )
        self._line.look(stats, self.now)

    def work(self, seconds: float, **state: int) -> None:
        """A quarter of 100 tokens in and 400 out a second; a fifth of the prompts are known."""
        for _ in range(round(seconds / TICK)):
            self.counters.prompt_tokens += 25
            self.counters.prefix_query_tokens += 25
            self.counters.prefix_hit_tokens += 5
            self.counters.generated_tokens += 100
            self.tick(**state)


def test_a_busy_engine_says_its_rates_every_few_seconds() -> None:
    engine = Engine()
    for _ in range(100):
        engine.tick()
    began = engine.now
    engine.work(3 * RATE_SECONDS, running=3, waiting=2, blocks=50)
    assert [round(at - began, 2) for at, _ in engine.said] == [5.0, 10.0, 15.0]
    assert engine.said[0][1] == {
        "running": 3,
        "waiting": 2,
        "in_tokens_per_s": 100.0,
        "out_tokens_per_s": 400.0,
        "kv_used_percent": 25.0,
        "prefix_hit_percent": 20.0,
    }


def test_an_idle_engine_and_a_short_burst_say_nothing() -> None:
    engine = Engine()
    for _ in range(5):
        engine.work(RATE_SECONDS - 1, running=1)
        for _ in range(40):
            engine.tick()
    assert engine.said == []


def test_short_requests_that_never_end_are_work_though_none_runs_at_the_look() -> None:
    engine = Engine()
    engine.tick()
    engine.work(2 * RATE_SECONDS)
    assert len(engine.said) == 2


def test_no_share_of_hits_is_told_where_no_prompt_was_looked_up() -> None:
    engine = Engine()
    for _ in range(40):
        engine.counters.generated_tokens += 1
        engine.tick(running=1)
    assert "prefix_hit_percent" not in engine.said[0][1]
