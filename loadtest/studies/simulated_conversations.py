"""Conversations that run beside each other over engines behind one router, in a computed clock.

The router's dispatcher, the schedulers' cores with their prefix caches, the digests and the beats
are the real ones; a step takes as long as ``simulate_policies.StepTime`` says.
"""

from __future__ import annotations

import heapq
import itertools
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import msgspec

from penstock.loadtest.studies.counted_router import (
    ATTEMPT,
    TOKENIZER,
    CountedRouter,
    address_of,
    engine_beat,
)
from penstock.loadtest.studies.simulate_policies import StepTime
from penstock.protocol.prefix_digest import chain_root, extended
from penstock.protocol.process.participant import BEAT_SECONDS
from penstock.protocol.wire.messages.membership import Beat
from penstock.protocol.wire.messages.requests import (
    TOKEN_BYTES,
    ChoiceState,
    Enqueue,
    RequestHead,
    TokenWork,
)
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

    def limits(self, blocks: int, times: int = 1) -> Limits:
        """Limits of an engine with so many blocks that is as large as so many of these."""
        return Limits(
            num_blocks=blocks,
            block_size=BLOCK,
            max_num_seqs=self.max_num_seqs * times,
            max_num_batched_tokens=2048 * times,
            max_model_len=32_768,
            vocab_size=VOCABULARY,
        )


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


class Worker:
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


@dataclass(slots=True)
class Open:
    """A request that has no end yet."""

    client: Conversation
    began: float
    prompt: bytes
    prefix: bytes
    """Digests of the prompt."""
    length: int
    """Tokens of its answer."""
    attempt: int = ATTEMPT
    engine: int = 0
    """The one that it went to last."""


class Engine:
    """A scheduler's core with its worker."""

    def __init__(self, number: int, limits: Limits, step_time: StepTime) -> None:
        self.number = number
        self.limits = limits
        self.core = SchedulerCore(limits, 1, make_policy("fcfs"), True, 1_000_000)
        self.result: StepResult | None = None
        """The result of the step that runs."""
        self.requests = 0
        self.alive = True
        self._worker = Worker(step_time)

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
        self._setting, self._limits, self._step = setting, limits, step
        self._digests = digests
        self._engines: dict[int, Engine] = {}
        """Those that are gone, too."""
        self._by_address: dict[str, Engine] = {}
        self._router = CountedRouter(self._deliver)
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._pauses = random.Random(setting.seed + 1)
        self._now = 0.0
        self._open: dict[int, Open] = {}
        self._started: set[int] = set()
        self._ttft: list[float] = []
        self._ids = itertools.count(1)
        self._left = len(self._clients)
        self._beats = 0
        self._largest_beat = 0
        self._delivered: list[tuple[str, Enqueue]] = []

    def run(self) -> Result:
        for number in range(1, self._setting.engines + 1):
            self._join(number, BEAT_SECONDS * number / self._setting.engines)
        for client in self._clients:
            begin = self._pauses.uniform(0, self._setting.begin_within)
            self._at(begin, partial(self._say, client))
        while self._left:
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._result()

    def _join(self, number: int, next_beat: float) -> Engine:
        """A new engine, whose second beat comes then."""
        engine = self._engines[number] = Engine(number, self._limits, self._step)
        self._by_address[address_of(number)] = engine
        self._router.hello(number, self._now)
        self._router.beat(engine.beat(0), self._now)
        self._at(next_beat, partial(self._beat, engine))
        return engine

    def _at(self, when: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._order), event))

    def _beat(self, engine: Engine) -> None:
        if not engine.alive:
            return
        known = self._router.roster.prefixes.version(engine.number)
        size = self._router.beat(engine.beat(known), self._now)
        self._beats += 1
        self._largest_beat = max(self._largest_beat, size)
        self._at(self._now + BEAT_SECONDS, partial(self._beat, engine))

    def _say(self, client: Conversation) -> None:
        question, length = client.turns.pop(0)
        client.tokens += question
        prompt = client.tokens.tobytes()
        prefix = extended(b"", chain_root(HEAD), prompt) if self._digests else b""
        number = next(self._ids)
        self._open[number] = Open(client, self._now, prompt, prefix, length)
        self._send(number)

    def _send(self, number: int) -> None:
        """An attempt of a request, with what it has produced by now."""
        asked = self._open[number]
        output = asked.client.tokens[len(asked.prompt) // TOKEN_BYTES :].tobytes()
        work = TokenWork(
            head=HEAD,
            prompt=asked.prompt,
            sampling=SlotSampling(0.0, 0, 1.0, number).packed(),
            choices=[ChoiceState(0, output)],
            stop_ids=[],
            max_tokens=asked.length,
            prefix=asked.prefix,
        )
        message = Enqueue(
            number, asked.attempt, TOKENIZER, msgspec.msgpack.encode(work), HEAD.model,
            asked.prefix, 1, len(asked.prompt) // TOKEN_BYTES + asked.length,
        )  # fmt: skip
        self._router.request(message, self._now)
        for address, message in self._delivered:
            self._enqueue(self._by_address[address], message)
        self._delivered.clear()

    def _deliver(self, address: str, message: Enqueue) -> None:
        self._delivered.append((address, message))

    def _enqueue(self, engine: Engine, message: Enqueue) -> None:
        self._open[message.id].engine = engine.number
        engine.requests += 1
        if not engine.alive:
            return  # nobody knows yet
        work = msgspec.msgpack.decode(message.work, type=TokenWork)
        rejected = engine.core.add(message.id, message.attempt, message.reply_to, work, self._now)
        if rejected is not None:
            raise ValueError(f"request {message.id}: {rejected.message}")
        self._go_on(engine)

    def _go_on(self, engine: Engine) -> None:
        seconds = engine.next_step(self._now)
        if seconds is not None:
            self._at(self._now + seconds, partial(self._stepped, engine))

    def _stepped(self, engine: Engine) -> None:
        if not engine.alive:
            return
        result, engine.result = engine.result, None
        if result is not None:
            self._note(engine.core.apply(result, self._now))
        self._go_on(engine)

    def _note(self, batches: Batches) -> None:
        for _, batch in batches:
            tokens, at = array("i", batch.tokens), 0
            for number, count in zip(batch.ids, batch.counts, strict=True):
                asked = self._open[number]
                asked.client.tokens += tokens[at : at + count]
                at += count
                if number not in self._started:
                    self._started.add(number)
                    self._ttft.append(self._now - asked.began)
            for end in batch.ends:
                client = self._open.pop(batch.ids[end.row]).client
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
            imbalance([engine.requests for engine in engines]),
            imbalance(computed),
            sum(self._ttft) / len(self._ttft),
            1e6 * router.seconds[Enqueue] / router.requests,
            1e6 * router.seconds[Beat] / self._beats,
            self._largest_beat,
            dict(router.dispatcher.placement.placed_by),
        )


def imbalance(values: list[int]) -> float:
    """The greatest over the mean."""
    return max(values) * len(values) / sum(values)
