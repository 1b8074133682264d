"""Placement over many engines, some of which die while others join: a simulation with a picture.

    python -m penstock.loadtest.studies.placement_at_scale [--engines 64] [--conversations 10000]
        [--picture docs/images/placement-at-scale.svg] [--by-room] [--json]

Router, schedulers' cores with their prefix caches, digests and beats are the real ones
(``simulated_conversations``). Three rows: one engine with the memory and the speed of all, the
engines, and the engines of which one is lost every few seconds and replaced by an empty one, and
once an eighth of all at the same moment; with ``--by-room`` the engines where no request has
digests, too.

What an engine loses is known ``NOTICED_SECONDS`` later; its requests go on elsewhere with what they
have, as tokenizers send them. A share of an engine is what it would get if each of the engines that
lived got the same at every moment: so engines that lived for a part of the time are compared, too.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import msgspec

from penstock.loadtest.studies.placement_picture import Kind, Line, draw
from penstock.loadtest.studies.simulate_policies import StepTime
from penstock.loadtest.studies.simulated_conversations import (
    BLOCK,
    Engine,
    Open,
    Result,
    Setting,
    Simulation,
)
from penstock.protocol.process.participant import BEAT_SECONDS
from penstock.services.scheduler.limits import Limits

SCALE = Setting(
    engines=64, conversations=10_000, applications=16, turns=(4, 7), answer=(4, 16),
    begin_within=120.0, max_num_seqs=32, speed=0.25,
)  # fmt: skip
"""A step of an engine takes 48 ms, a token of a prompt in it 0.4 ms more."""
ENGINE_TOKENS = 48_000
"""KV memory of an engine: about as much as the conversations have that run there at a time."""
LOSS_SECONDS, JOIN_SECONDS, NOTICED_SECONDS = 8.0, 4.0, 1.0
"""From one loss to the next; from a loss to the new engine; from a loss to the router's knowing."""
WINDOW = 5.0
"""Seconds of a point of the picture."""
LEAST_SHARE = 100.0
"""An engine whose share is less lived too shortly for its part of the requests to say anything."""


@dataclass(slots=True)
class Course:
    """How one simulation went."""

    result: Result
    hit_rates: list[tuple[float, float]]
    """By time, of each ``WINDOW``."""
    shares: list[float]
    """Requests of each engine, over its share."""
    losses: list[float]
    """When an engine was lost."""
    continued: int
    """Requests that went on elsewhere."""

    @property
    def name(self) -> str:
        return self.result.name


class Life:
    """Of one engine: when, and what it had told of its cache by its last beat."""

    def __init__(self, engine: Engine, began: float) -> None:
        self.engine, self.began, self.ended = engine, began, float("inf")
        self.asked = self.found = 0


class ScaleSimulation(Simulation):
    """Losses and joins, and what came of them over the time."""

    def __init__(
        self, setting: Setting, limits: Limits, step: StepTime, digests: bool, *, losses: bool
    ) -> None:
        super().__init__(setting, limits, step, digests)
        self._lives: dict[int, Life] = {}
        self._losing = losses
        self._losses: list[float] = []
        self._continued = 0
        self._asked: Counter[int] = Counter()
        self._found: Counter[int] = Counter()
        """Prompt tokens by the window in which they were looked up."""
        self._requests: Counter[int] = Counter()
        """By the second."""

    def course(self, name: str) -> Course:
        """Play it."""
        if self._losing:
            self._at(LOSS_SECONDS, self._lose_one)
            self._at(self._setting.begin_within / 2 + LOSS_SECONDS / 2, self._lose_many)
        result = self.run()
        self._note_hits()
        shares = self._shares()
        result.name, result.requests_imbalance = name, max(shares)
        rates = [
            (WINDOW * at, self._found[at] / self._asked[at])
            for at in sorted(self._asked)
            if WINDOW * at < self._setting.begin_within
        ]
        return Course(result, rates, shares, self._losses, self._continued)

    def _join(self, number: int, next_beat: float) -> Engine:
        engine = super()._join(number, next_beat)
        self._lives[number] = Life(engine, self._now)
        return engine

    def _beat(self, engine: Engine) -> None:
        super()._beat(engine)
        if engine.alive:
            self._note_hit(self._lives[engine.number])

    def _send(self, number: int) -> None:
        self._requests[int(self._now)] += 1
        super()._send(number)

    def _lose_one(self) -> None:
        self._lose(1)
        if self._now < self._setting.begin_within:
            self._at(self._now + LOSS_SECONDS, self._lose_one)

    def _lose_many(self) -> None:
        self._lose(max(1, self._setting.engines // 8))

    def _lose(self, count: int) -> None:
        """The eldest ones."""
        living = [life for life in self._lives.values() if life.engine.alive]
        for life in living[: min(count, len(living) - 1)]:
            self._note_hit(life)
            life.engine.alive, life.ended = False, self._now + NOTICED_SECONDS
            self._losses.append(self._now)
            self._at(self._now + NOTICED_SECONDS, partial(self._go_on_elsewhere, life.engine))
            number = len(self._lives) + len(self._losses)
            self._at(self._now + JOIN_SECONDS, partial(self._begin, number))

    def _begin(self, number: int) -> None:
        self._join(number, self._now + BEAT_SECONDS)

    def _go_on_elsewhere(self, engine: Engine) -> None:
        """The router knows, and so do those who own the engine's requests."""
        self._router.lost(engine.number)
        for number, asked in list(self._open.items()):
            if asked.engine == engine.number:
                self._open[number] = _next_attempt(asked)
                self._continued += 1
                self._send(number)

    def _note_hits(self) -> None:
        for life in self._lives.values():
            self._note_hit(life)

    def _note_hit(self, life: Life) -> None:
        counters, window = life.engine.core.counters, int(self._now / WINDOW)
        self._asked[window] += counters.prefix_query_tokens - life.asked
        self._found[window] += counters.prefix_hit_tokens - life.found
        life.asked, life.found = counters.prefix_query_tokens, counters.prefix_hit_tokens

    def _shares(self) -> list[float]:
        """Requests of each engine over its share, the greatest last."""
        shares: defaultdict[int, float] = defaultdict(float)
        for second, count in self._requests.items():
            living = [n for n, life in self._lives.items() if life.began <= second < life.ended]
            for number in living:
                shares[number] += count / len(living)
        return sorted(
            life.engine.requests / shares[number]
            for number, life in self._lives.items()
            if shares[number] >= min(LEAST_SHARE, max(shares.values()))
        )


def _next_attempt(asked: Open) -> Open:
    return replace(asked, attempt=asked.attempt + 1)


def measure(
    setting: Setting = SCALE, engine_tokens: int = ENGINE_TOKENS, *, by_room: bool = False
) -> list[Course]:
    """One engine with all memory and speed, the engines, the engines with losses; by room alone."""
    return [play() for play in plays(setting, engine_tokens)[: 4 if by_room else 3]]


def plays(
    setting: Setting = SCALE, engine_tokens: int = ENGINE_TOKENS
) -> list[Callable[[], Course]]:
    """What plays each of the four courses."""
    many, usual, speed = setting.engines, StepTime(), setting.speed
    times = (usual.base, usual.prefill_token, usual.decode_row)
    step, fast = (StepTime(*(x / each for x in times)) for each in (speed, many * speed))
    blocks = engine_tokens // BLOCK
    one, small = replace(setting, engines=1), setting.limits(blocks)

    def play(name: str, *, digests: bool = True, losses: bool = False) -> Callable[[], Course]:
        simulation = partial(ScaleSimulation, setting, small, step, digests, losses=losses)
        return lambda: simulation().course(name)

    def large() -> Course:
        limits = setting.limits(blocks * many, many)
        found = ScaleSimulation(one, limits, fast, True, losses=False)
        return found.course(f"one engine as large as {many}")

    return [
        large,
        play(f"{many} engines"),
        play(f"{many} engines, some lost", losses=True),
        play(f"{many} engines, by room alone", digests=False),
    ]


def table(courses: list[Course]) -> str:
    """A Markdown table."""
    lines = [
        "| | requests | hit rate | requests, max / share | computed, max / mean | mean TTFT | "
        "router's CPU, a request | a beat |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for course in courses:
        row = course.result
        computed = "–" if course.losses else f"{row.computed_imbalance:.2f}"
        lines.append(
            f"| {row.name} | {row.requests:,} | {row.hit_rate:.3f} | "
            f"{row.requests_imbalance:.2f} | {computed} | {1000 * row.mean_ttft:.0f} ms | "
            f"{row.router_us:.0f} µs | {row.beat_us:.0f} µs |"
        )
    return "\n".join(lines)


def picture(courses: list[Course]) -> str:
    """An SVG document."""
    kinds: tuple[Kind, ...] = ("reference", "first", "second", "other")
    lines = [
        Line(course.name, kind, course.hit_rates, course.shares, course.losses)
        for course, kind in zip(courses, kinds, strict=False)
    ]
    return draw(lines)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.loadtest.studies.placement_at_scale",
        description="Simulate placement over many engines that come and go.",
    )
    parser.add_argument("--engines", type=int, default=SCALE.engines)
    parser.add_argument("--conversations", type=int, default=SCALE.conversations)
    parser.add_argument("--begin-within", type=float, default=SCALE.begin_within, help="seconds")
    parser.add_argument("--seed", type=int, default=SCALE.seed)
    parser.add_argument("--by-room", action="store_true", help="and without digests")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="an SVG")
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json, path = arguments.pop("json"), arguments.pop("picture")
    by_room = arguments.pop("by_room")
    courses = measure(replace(SCALE, **arguments), by_room=by_room)
    if path is not None:
        path.write_text(picture(courses))
    if as_json:
        print(msgspec.json.encode(courses).decode())
        return 0
    print(table(courses))
    one, many, lost = courses[:3]
    print(
        f"hit rates of {many.result.hit_rate / one.result.hit_rate:.3f} and, with "
        f"{len(lost.losses)} engines lost and {lost.continued} requests continued, "
        f"{lost.result.hit_rate / one.result.hit_rate:.3f} of one engine's; placed by "
        f"{many.result.placed_by}"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
