"""How many threads compute on the CPU: measured on decode and on prefill steps, apart.

Every operation of a step ends with all threads waiting for the slowest. The other processes use
the same cores, so with as many threads as cores one of them is often not running: a step of a 4 M
model was measured at 2 ms with one thread and 30 ms with two, on two cores with others at work. A
large model gains more by the second thread than it loses, and prefill more than decode. So both
numbers are taken from what the machine does now, and a smaller number wins unless a larger one is
clearly faster.

The moment of the start is a busy one: all processes of a server start at once. So in pauses it is
looked at again: a step at a time, for a request may come, and ever more seldom while nothing
changes. For each number the least that any of the latest looks has measured counts, because other
programs only ever make a step longer: one quiet look corrects a busy one, and only a machine that
stays busy changes a choice that was right.

What is measured is an executor of its own (``trial_capacity``), with the same model and KV memory
for these steps alone: cached prefixes stay as they are.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

import msgspec
import numpy as np
import torch

from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.executor import DirectExecutor

WORTHWHILE = 0.85
"""More threads are taken only if they need at most this share of the time that fewer need."""
HOPELESS = 2.0
"""A number of threads that takes so many times the best time ends a round: fewer take longer."""
ROWS = 8
"""Sequences in a measured decode step."""
PREFILL_ROWS = 64
"""Tokens of a measured prefill step: products of so many rows are bound by arithmetic already."""
ROUNDS = 5
STEPS = 3
"""Measured in each round, after one that wakes the threads."""
SECONDS = 1.0
"""No further round of decode begins after this time, nor of prefill, …"""
START_SECONDS = 0.2
"""… and at the start, for which somebody waits: pauses soon correct what was chosen then."""
LOOKS = 3
"""Looks that are taken even if nobody uses the server."""
REMEMBERED = 8
"""The latest looks, whose least counts. They reach back for more than half an hour: what another
program does just when this server pauses says little about when it computes."""
PAUSE_SECONDS = 2.0
"""Only a pause of this length is used to look again."""
FIRST_INTERVAL = 15.0
"""Seconds after a look that changed something, twice as many after each that did not, up to …"""
LONGEST_INTERVAL = 960.0
MOST_SECONDS = 0.5
"""Steps that take longer are not measured in a pause: a request would have to wait for them."""
_GREEDY = SlotSampling(0.0, 0, 1.0, 0).packed()

Clock = Callable[[], float]
Samples = dict[int, list[float]]
"""Seconds of steps, by threads."""


class StepThreads(NamedTuple):
    """Threads of steps that decode, and of those with many rows of prefill."""

    decode: int
    prefill: int


class ThreadChoice(msgspec.Struct, frozen=True):
    """Numbers of threads, and the time of a step with each number that was tried."""

    threads: StepThreads
    decode_ms: dict[int, float]
    prefill_ms: dict[int, float]

    def __str__(self) -> str:
        """``decode on 1 thread: a step takes 1.2 ms with 1, 1.9 ms with 2; prefill on …``."""
        return "; ".join(
            _sentence(name, count, times)
            for name, count, times in (
                ("decode", self.threads.decode, self.decode_ms),
                ("prefill", self.threads.prefill, self.prefill_ms),
            )
        )


def _sentence(name: str, count: int, step_ms: dict[int, float]) -> str:
    times = ", ".join(f"{ms:.2g} ms with {tried}" for tried, ms in sorted(step_ms.items()))
    return f"{name} on {count} thread{'s' if count > 1 else ''}: a step takes {times}"


def candidates(cores: int) -> list[int]:
    """1, 2, 4, … and the most: all cores of a machine with two, else all but one."""
    most = cores if cores <= 2 else cores - 1
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return [*[count for count in powers if count < most], most]


def preferred(seconds: dict[int, float]) -> int:
    """The number of threads to take. ``seconds``: of a step, by threads."""
    counts = iter(sorted(seconds))
    best = next(counts)
    for count in counts:
        if seconds[count] < WORTHWHILE * seconds[best]:
            best = count
    return best


def trial_capacity(capacity: EngineSizes) -> EngineSizes:
    """What an executor must hold for the steps that are measured, within another's capacity."""
    tokens = min(PREFILL_ROWS, capacity.max_num_batched_tokens, capacity.max_model_len)
    rows = min(ROWS, capacity.max_num_seqs, capacity.max_num_batched_tokens)
    blocks = max(1, len(capacity.groups)) * max(rows, -(-tokens // capacity.block_size))
    return msgspec.structs.replace(
        capacity,
        num_blocks=min(blocks, capacity.num_blocks),
        max_num_seqs=rows,
        max_num_batched_tokens=max(tokens, rows),
        max_model_len=min(capacity.max_model_len, max(tokens, capacity.block_size)),
    )


class _Kind(Protocol):
    """Runs steps of a kind; yields the seconds of each that counts, ``None`` for others."""

    def __call__(self, executor: DirectExecutor, clock: Clock) -> Iterator[float | None]: ...


def decode_steps(executor: DirectExecutor, clock: Clock) -> Iterator[float | None]:
    """Decode steps of up to ``ROWS`` sequences, after two others."""
    capacity = executor.capacity
    each = max(1, len(capacity.groups))
    rows = min(
        ROWS, capacity.max_num_seqs, capacity.num_blocks // each, capacity.max_num_batched_tokens
    )
    steps = max(1, min(STEPS, capacity.block_size - 2, capacity.max_model_len - 2))
    token = np.zeros(1, "<i4").tobytes()
    added = [
        NewSlot(slot, token, 1, 0, list(range(slot * each, (slot + 1) * each)), _GREEDY)
        for slot in range(rows)
    ]
    chunks = [Chunk(slot, 0, 1, True, []) for slot in range(rows)]
    executor.execute(StepPlan(0, 1, True, [], added, [], chunks))
    yield None
    for step in range(2, 3 + steps):
        begun = clock()
        executor.execute(StepPlan(0, step, False, [], [], [], []))
        taken = clock() - begun
        yield taken if step > 2 else None
    executor.reset()


def prefill_steps(executor: DirectExecutor, clock: Clock) -> Iterator[float | None]:
    """One prefill of ``PREFILL_ROWS`` tokens, or of as many as fit, after a small one."""
    capacity = executor.capacity
    most = min(capacity.max_num_batched_tokens, capacity.max_model_len)
    most = min(PREFILL_ROWS, most, capacity.kv_tokens)
    for count in (1, most):
        begun = clock()
        executor.execute(prefill_plan(capacity, count))
        taken = clock() - begun
        executor.reset()
        yield taken if count == most else None


def prefill_plan(capacity: EngineSizes, count: int) -> StepPlan:
    """A prompt of ``count`` tokens, alone."""
    ids = (np.arange(count, dtype=np.int64) % capacity.vocab_size).astype("<i4").tobytes()
    blocks = list(range(max(1, len(capacity.groups)) * -(-count // capacity.block_size)))
    new = NewSlot(0, ids, count, 0, blocks, _GREEDY)
    return StepPlan(0, 1, True, [], [new], [], [Chunk(0, 0, count, True, [])])


class ThreadTrial:
    """Measures steps with several numbers of threads, and remembers the latest looks."""

    def __init__(
        self, executor: DirectExecutor, counts: list[int], clock: Clock = time.perf_counter
    ) -> None:
        """executor: used for nothing else; counts: ascending."""
        self._executor, self._counts, self._clock = executor, counts, clock
        self._looks: dict[_Kind, deque[dict[int, float]]] = {
            kind: deque(maxlen=REMEMBERED) for kind in (decode_steps, prefill_steps)
        }

    @property
    def choice(self) -> ThreadChoice:
        """What all looks that are remembered say."""
        decode, prefill = (self._least(kind) for kind in (decode_steps, prefill_steps))
        return ThreadChoice(
            StepThreads(preferred(decode), preferred(prefill)),
            {count: 1000 * seconds for count, seconds in decode.items()},
            {count: 1000 * seconds for count, seconds in prefill.items()},
        )

    def _least(self, kind: _Kind) -> dict[int, float]:
        looks = self._looks[kind]
        return {
            count: min(look[count] for look in looks if count in look)
            for count in self._counts
            if any(count in look for look in looks)
        }

    def start(self) -> ThreadChoice:
        """The first look, at once."""
        for _ in self._look(float("inf"), START_SECONDS):
            pass
        return self.choice

    def again(self) -> Iterator[None]:
        """Another look, a step at a time, of up to ``MOST_SECONDS`` each."""
        return self._look(MOST_SECONDS, SECONDS)

    def _look(self, limit: float, seconds: float) -> Iterator[None]:
        for kind, looks in self._looks.items():
            times: Samples = {}
            counts = self._short(kind, limit)
            begun = self._clock()
            for number in range(ROUNDS):
                if number and self._clock() - begun > seconds:
                    break
                yield from self._round(kind, counts, times, limit)
            if times:
                looks.append({count: min(some) for count, some in times.items()})

    def _short(self, kind: _Kind, limit: float) -> list[int]:
        """Numbers of threads with which a step of a quiet machine takes up to ``limit`` seconds:
        there more threads take no longer than fewer, whatever they took when others were at work.
        """
        known, short, least = self._least(kind), [], float("inf")
        for count in self._counts:
            least = min(least, known.get(count, least))
            if least <= limit:
                short.append(count)
        return short

    def _round(
        self, kind: _Kind, counts: list[int], times: Samples, limit: float
    ) -> Iterator[None]:
        """Try the most threads first, then fewer, as long as that is not hopeless. A number of
        threads with which a step took longer than the limit leaves ``counts``."""
        best = float("inf")
        for count in counts[::-1]:
            found = []
            self._executor.reset()
            steps = kind(self._executor, self._clock)
            while True:
                # Other steps may have come in between.
                torch.set_num_threads(count)
                begun = self._clock()
                try:
                    seconds = next(steps)
                except StopIteration:
                    break
                if seconds is not None:
                    found.append(seconds)
                slow = self._clock() - begun > limit
                yield
                if slow:
                    counts.remove(count)
                    break
            if not found:
                continue
            times.setdefault(count, []).extend(found)
            typical = statistics.median(found)
            if typical > HOPELESS * best:
                return
            best = min(best, typical)


class Choice(Protocol):
    @property
    def threads(self) -> StepThreads | int: ...


ChoiceT = TypeVar("ChoiceT", bound=Choice)
ChoiceT_co = TypeVar("ChoiceT_co", bound=Choice, covariant=True)


class Trial(Protocol[ChoiceT_co]):
    """``ThreadTrial``, or what else measures steps with several numbers of threads."""

    @property
    def choice(self) -> ChoiceT_co:
        """What its looks say."""

    def again(self) -> Iterator[None]:
        """Another look, a step at a time."""


class ThreadReview(Generic[ChoiceT]):
    """When to look again, and what came of it."""

    def __init__(self, trial: Trial[ChoiceT]) -> None:
        """trial: with its first look taken."""
        self._trial = trial
        self.choice = trial.choice
        self._looks = 1
        self._interval = FIRST_INTERVAL
        self._next = 0.0
        self._used = False
        self._under_way: Iterator[None] | None = None

    def used(self) -> None:
        """Steps were computed for somebody."""
        self._used = True

    def go_on(self, now: float, pause: float) -> bool:
        """Measure one step if it is time to, in a pause that has lasted ``pause`` seconds; returns
        whether there is more to do at once. ``choice`` is new when a look has ended.

        Past the first looks it is time only if the server was used since the last one.
        """
        if pause < PAUSE_SECONDS:
            return False
        if self._under_way is None:
            if now < self._next or not (self._used or self._looks < LOOKS):
                return False
            self._used = False
            self._under_way = self._trial.again()
        for _ in self._under_way:
            return True
        self._under_way = None
        self._end(now)
        return False

    def _end(self, now: float) -> None:
        before, self.choice = self.choice.threads, self._trial.choice
        self._looks += 1
        changed = self.choice.threads != before
        self._interval = FIRST_INTERVAL if changed else min(2 * self._interval, LONGEST_INTERVAL)
        self._next = now + self._interval


def agreeing(executor: LogitsExecutor, counts: list[int]) -> list[int]:
    """The numbers of threads in ``counts`` with which logits have the same bits as with the first:
    those of one row, and of as many as are measured."""
    capacity = executor.capacity
    most = min(PREFILL_ROWS, capacity.max_num_batched_tokens, capacity.max_model_len)
    most = min(most, capacity.kv_tokens)

    def logits(count: int) -> list[torch.Tensor]:
        torch.set_num_threads(count)
        found = []
        for rows in (1, most):
            found.append(executor.logits(prefill_plan(capacity, rows)).clone())
            executor.reset()
        return found

    first = logits(counts[0])
    return [
        count
        for count in counts
        if count == counts[0]
        or all(torch.equal(a, b) for a, b in zip(logits(count), first, strict=True))
    ]


class LogitsExecutor(Protocol):
    """What ``agreeing`` needs of an executor."""

    capacity: EngineSizes

    def logits(self, plan: StepPlan) -> torch.Tensor: ...

    def reset(self) -> None: ...
