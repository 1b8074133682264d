"""How well requests find the engine that has cached their beginning: conversations over engines.

    python -m penstock.loadtest.prefix_affinity [--engines 8] [--conversations 200] [--json]

Conversations of growing length run beside each other, each turn repeats all turns before it, and
one engine's KV memory holds a small part of them. The router's dispatcher, the schedulers' cores
with their prefix caches, the digests and the beats are the real ones; the clock is computed, and a
step takes as long as ``simulate_policies.StepTime`` says. Three rows are compared: one engine that
has the memory and the speed of all, the engines with the router as it is, and the same without
digests, where a request goes wherever there is room.

It also measures what a request costs the router, and what strangers with random prompts make of it.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import random
import sys
from array import array
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import msgspec

from penstock.loadtest.counted_router import (
    ATTEMPT,
    TOKENIZER,
    CountedRouter,
    address_of,
    engine_beat,
    strangers,
)
from penstock.loadtest.simulate_policies import StepTime
from penstock.protocol.prefix_digest import MAX_DIGESTS, chain_root, extended
from penstock.protocol.process.participant import BEAT_SECONDS
from penstock.protocol.wire.messages.membership import Beat
from penstock.protocol.wire.messages.requests import ChoiceState, Enqueue, RequestHead, TokenWork
from penstock.protocol.wire.messages.steps import SlotSampling, StepPlan, StepResult
from penstock.services.scheduler.core import Batches, SchedulerCore
from penstock.services.scheduler.limits import Limits
from penstock.services.scheduler.policy_choice import make_policy

VOCABULARY = 32_000
BLOCK = 16
HEAD = RequestHead(model="simulated")


@dataclass(frozen=True, slots=True)
class Setting:
    """What runs. Lengths are ranges in tokens, times in seconds."""

    engines: int = 8
    conversations: int = 200
    memory: float = 1.25
    """KV memory of all engines together, in lengths of all conversations at their end."""
    seed: int = 0
    applications: int = 4
    """Each has a system prompt of its own."""
    system: tuple[int, int] = (100, 400)
    turns: tuple[int, int] = (5, 9)
    question: tuple[int, int] = (20, 300)
    answer: tuple[int, int] = (40, 200)
    pause: float = 4.0
    """Mean between an answer and the next question."""
    begin_within: float = 30.0
    max_num_seqs: int = 32
    speed: float = 1.0
    """The speed of an engine, in multiples of ``StepTime``'s."""


@dataclass(slots=True)
class Conversation:
    """One client."""

    number: int
    tokens: array[int]
    turns: list[tuple[array[int], int]]
    """What it says, and how many tokens the answer gets."""


def conversations(setting: Setting) -> list[Conversation]:
    """All clients, before their first turn."""
    numbers = random.Random(setting.seed)

    def text(length: tuple[int, int]) -> array[int]:
        return array("i", numbers.choices(range(VOCABULARY), k=numbers.randint(*length)))

    systems = [text(setting.system) for _ in range(setting.applications)]
    return [
        Conversation(
            number,
            systems[number % len(systems)][:],
            [
                (text(setting.question), numbers.randint(*setting.answer))
                for _ in range(numbers.randint(*setting.turns))
            ],
        )
        for number in range(setting.conversations)
    ]


class _Worker:
    """Answers plans with tokens that depend on the request and the position alone."""

    def __init__(self, step_time: StepTime) -> None:
        self._step_time = step_time
        self._slots: dict[int, list[int]] = {}
        """(seed, tokens produced, decoding) by slot."""

    def execute(self, plan: StepPlan) -> StepResult:
        for gone in plan.gone:
            del self._slots[gone]
        for new in plan.added:
            sampling = msgspec.msgpack.decode(new.sampling, type=SlotSampling)
            self._slots[new.slot] = [sampling.seed, new.length - new.prompt_len, 0]
        rows = [slot for _, slot in sorted(self._slots.items()) if slot[2]]
        seconds = self._step_time.of(sum(chunk.count for chunk in plan.chunks), len(rows))
        rows += [self._slots[chunk.slot] for chunk in plan.chunks if chunk.sample]
        tokens = array("i")
        for slot in rows:
            slot[1], slot[2] = slot[1] + 1, 1
            tokens.append((slot[0] * 7919 + slot[1] * 104729) % VOCABULARY)
        return StepResult(plan.epoch, plan.step, tokens.tobytes(), [], seconds)


class _Engine:
    """A scheduler's core with its worker."""

    def __init__(self, number: int, limits: Limits, step_time: StepTime) -> None:
        self.number = number
        self.limits = limits
        self.core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 1_000_000)
        self.result: StepResult | None = None
        """The result of the step that runs."""
        self.requests = 0
        self._worker = _Worker(step_time)

    def next_step(self, now: float) -> float | None:
        """Begin a step if none runs; returns how long it takes."""
        if self.result is not None or (plan := self.core.plan(now)) is None:
            return None
        self.result = self._worker.execute(plan)
        return self.result.seconds

    def beat(self, known: int) -> Beat:
        prefixes = self.core.prefixes
        return engine_beat(
            self.number,
            self.core.open_sequences,
            self.limits.max_num_seqs,
            None if prefixes is None else prefixes.report(known),
        )


@dataclass(slots=True)
class Result:
    """One row."""

    name: str
    requests: int
    hit_rate: float
    """Prompt tokens found in the cache, over all prompt tokens."""
    requests_imbalance: float
    """Requests of the engine with the most, over the mean."""
    computed_imbalance: float
    """The same ratio of the tokens that were computed."""
    mean_ttft: float
    router_us: float
    """CPU of the router for a request."""
    beat_us: float
    """CPU of the router for a beat of an engine."""
    largest_beat: int
    """Bytes."""
    placed_by: dict[str, int]


class Simulation:
    """One setting, played once."""

    def __init__(self, setting: Setting, limits: Limits, step: StepTime, digests: bool) -> None:
        self._clients = conversations(setting)
        self._setting = setting
        self._digests = digests
        self._engines = {n: _Engine(n, limits, step) for n in range(1, setting.engines + 1)}
        self._by_address = {address_of(engine.number): engine for engine in self._engines.values()}
        self._router = CountedRouter(self._deliver)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pauses = random.Random(setting.seed + 1)
        self._now = 0.0
        self._open: dict[int, tuple[Conversation, float]] = {}
        """Each request's conversation, and when it began."""
        self._started: set[int] = set()
        self._ttft: list[float] = []
        self._ids = itertools.count(1)
        self._left = len(self._clients)
        self._beats = 0
        self._largest_beat = 0
        self._delivered: list[tuple[str, Enqueue]] = []

    def run(self) -> Result:
        for engine in self._engines.values():
            self._router.hello(engine.number)
            self._router.beat(engine.beat(0), self._now)
            self._at(BEAT_SECONDS * engine.number / len(self._engines), partial(self._beat, engine))
        for client in self._clients:
            begin = self._pauses.uniform(0, self._setting.begin_within)
            self._at(begin, partial(self._say, client))
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._result()

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _beat(self, engine: _Engine) -> None:
        known = self._router.roster.prefixes.version(engine.number)
        size = self._router.beat(engine.beat(known), self._now)
        self._beats += 1
        self._largest_beat = max(self._largest_beat, size)
        self._at(self._now + BEAT_SECONDS, partial(self._beat, engine))

    def _say(self, client: Conversation) -> None:
        question, length = client.turns.pop(0)
        client.tokens += question
        number = next(self._ids)
        self._open[number] = (client, self._now)
        prompt = client.tokens.tobytes()
        prefix = extended(b"", chain_root(HEAD), prompt) if self._digests else b""
        work = TokenWork(
            head=HEAD,
            prompt=prompt,
            sampling=SlotSampling(0.0, 0, 1.0, number).packed(),
            choices=[ChoiceState(0)],
            stop_ids=[],
            max_tokens=length,
            prefix=prefix,
        )
        body = msgspec.msgpack.encode(work)
        self._router.request(
            Enqueue(number, ATTEMPT, TOKENIZER, body, HEAD.model, prefix), self._now
        )
        for address, message in self._delivered:
            self._enqueue(self._by_address[address], message)
        self._delivered.clear()

    def _deliver(self, address: str, message: Enqueue) -> None:
        self._delivered.append((address, message))

    def _enqueue(self, engine: _Engine, message: Enqueue) -> None:
        engine.requests += 1
        work = msgspec.msgpack.decode(message.work, type=TokenWork)
        rejected = engine.core.add(message.id, message.attempt, message.reply_to, work, self._now)
        if rejected is not None:
            raise ValueError(f"request {message.id}: {rejected.message}")
        self._go_on(engine)

    def _go_on(self, engine: _Engine) -> None:
        seconds = engine.next_step(self._now)
        if seconds is not None:
            self._at(self._now + seconds, partial(self._stepped, engine))

    def _stepped(self, engine: _Engine) -> None:
        result, engine.result = engine.result, None
        if result is not None:
            self._note(engine.core.apply(result, self._now))
        self._go_on(engine)

    def _note(self, batches: Batches) -> None:
        for _, batch in batches:
            tokens, at = array("i", batch.tokens), 0
            for number, count in zip(batch.ids, batch.counts, strict=True):
                client, began = self._open[number]
                client.tokens += tokens[at : at + count]
                at += count
                if number not in self._started:
                    self._started.add(number)
                    self._ttft.append(self._now - began)
            for end in batch.ends:
                client, _ = self._open.pop(batch.ids[end.row])
                if client.turns:
                    pause = self._pauses.expovariate(1 / self._setting.pause)
                    self._at(self._now + pause, partial(self._say, client))
                else:
                    self._left -= 1

    def _result(self) -> Result:
        engines = list(self._engines.values())
        counts = [engine.core.stats().counters for engine in engines]
        asked = sum(count.prefix_query_tokens for count in counts)
        found = sum(count.prefix_hit_tokens for count in counts)
        computed = [
            c.prefix_query_tokens - c.prefix_hit_tokens + c.generated_tokens for c in counts
        ]
        router = self._router
        name = f"{len(engines)} engine{'s' if len(engines) > 1 else ''}"
        return Result(
            name if self._digests or len(engines) == 1 else f"{name}, by room alone",
            router.requests,
            found / asked,
            _imbalance([engine.requests for engine in engines]),
            _imbalance(computed),
            sum(self._ttft) / len(self._ttft),
            1e6 * router.seconds[Enqueue] / router.requests,
            1e6 * router.seconds[Beat] / self._beats,
            self._largest_beat,
            dict(router.dispatcher.placement.placed_by),
        )


def _imbalance(values: list[int]) -> float:
    return max(values) * len(values) / sum(values)


def measure(setting: Setting) -> list[Result]:
    """One engine with all memory, the engines with affinity, the engines without."""
    total = sum(
        len(client.tokens) + sum(len(question) + answer for question, answer in client.turns)
        for client in conversations(setting)
    )
    blocks = int(setting.memory * total / setting.engines / BLOCK)
    many = setting.engines
    usual, speed = StepTime(), setting.speed
    step = StepTime(usual.base / speed, usual.prefill_token / speed, usual.decode_row / speed)
    fast = StepTime(step.base, step.prefill_token / many, step.decode_row / many)
    one = replace(setting, engines=1)
    rows = [Simulation(one, _limits(setting, blocks * many, many), fast, True).run()]
    rows += [
        Simulation(setting, _limits(setting, blocks, 1), step, digests).run()
        for digests in (True, False)
    ]
    return rows


def _limits(setting: Setting, blocks: int, times: int) -> Limits:
    """Limits of an engine as large as so many others."""
    return Limits(
        num_blocks=blocks,
        block_size=BLOCK,
        max_num_seqs=setting.max_num_seqs * times,
        max_num_batched_tokens=2048 * times,
        max_model_len=32_768,
        vocab_size=VOCABULARY,
    )


def table(rows: list[Result]) -> str:
    """A Markdown table."""
    lines = [
        "| | requests | hit rate | requests, max / mean | computed, max / mean | mean TTFT | "
        "router, a request | a beat | largest beat |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {row.name} | {row.requests} | {row.hit_rate:.3f} | {row.requests_imbalance:.2f} | "
        f"{row.computed_imbalance:.2f} | {1000 * row.mean_ttft:.0f} ms | {row.router_us:.0f} µs | "
        f"{row.beat_us:.0f} µs | {row.largest_beat} B |"
        for row in rows
    ]
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """The command. Returns its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m penstock.loadtest.prefix_affinity",
        description="Measure how well requests find the engine that has cached their beginning.",
    )
    defaults = Setting()
    parser.add_argument("--engines", type=int, default=defaults.engines)
    parser.add_argument("--conversations", type=int, default=defaults.conversations)
    parser.add_argument("--memory", type=float, default=defaults.memory, help="in all lengths")
    parser.add_argument("--pause", type=float, default=defaults.pause, help="mean, in seconds")
    parser.add_argument("--speed", type=float, default=defaults.speed, help="of an engine")
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--json", action="store_true", help="print the numbers as JSON")
    arguments = vars(parser.parse_args(argv))
    as_json = arguments.pop("json")
    rows = measure(Setting(**arguments))
    random_prompts = [strangers(arguments["engines"], 20_000, count) for count in (24, MAX_DIGESTS)]
    if as_json:
        print(msgspec.json.encode([rows, random_prompts]).decode())
        return 0
    print(table(rows))
    print(f"hit rate of {rows[1].hit_rate / rows[0].hit_rate:.3f} of one engine's; ", end="")
    print(f"placed by {rows[1].placed_by}")
    for one in random_prompts:
        print(f"random prompts: {one}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
