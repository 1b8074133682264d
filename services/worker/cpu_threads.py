"""How many threads compute on the CPU: measured on decode steps, when the model is loaded.

Every operation of a step ends with all threads waiting for the slowest. The other processes use
the same cores, so with as many threads as cores one of them is often not running: a step of a 4 M
model was measured at 2 ms with one thread and 30 ms with two, on two cores with others at work. A
large model gains more by the second thread than it loses. So the number is taken from what the
machine does now, and a smaller number wins unless a larger one is clearly faster.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from penstock.protocol.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.executor import DirectExecutor

WORTHWHILE = 0.85
"""More threads are taken for at most this share of the time that fewer need."""
ROWS = 8
"""Sequences in a measured step."""
ROUNDS = 5
STEPS = 3
"""Measured in each round, after one that wakes the threads."""
SECONDS = 2.0
"""No further round begins after this time."""


class ThreadChoice(msgspec.Struct, frozen=True):
    """A number of threads, and the time of a step with each number that was tried."""

    threads: int
    step_ms: dict[int, float]

    def __str__(self) -> str:
        """``1 of 2 threads: a step takes 1.2 ms with 1, 1.9 ms with 2``."""
        times = ", ".join(f"{time:.2g} ms with {count}" for count, time in self.step_ms.items())
        return f"{self.threads} of {max(self.step_ms)} threads: a step takes {times}"


def candidates(cores: int) -> list[int]:
    """1, 2, 4, … and the most: all cores of a machine with two, else all but one."""
    most = cores if cores <= 2 else cores - 1
    powers = [1 << exponent for exponent in range(most.bit_length())]
    return [*[count for count in powers if count < most], most]


def choose_threads(executor: DirectExecutor, cores: int) -> ThreadChoice:
    """Measure steps with each candidate, set torch to the best, leave the executor reset."""
    counts = candidates(cores)
    times: dict[int, list[float]] = {count: [] for count in counts}
    begun = time.perf_counter()
    for number in range(ROUNDS):
        if number and time.perf_counter() - begun > SECONDS:
            break
        for count in counts:
            torch.set_num_threads(count)
            times[count] += decode_times(executor, STEPS)
    typical = {count: statistics.median(values) for count, values in times.items()}
    best = preferred(typical)
    torch.set_num_threads(best)
    return ThreadChoice(best, {count: 1000 * seconds for count, seconds in typical.items()})


def preferred(seconds: dict[int, float]) -> int:
    """The number of threads to take. ``seconds``: of a step, by threads, ascending."""
    counts = iter(seconds)
    best = next(counts)
    for count in counts:
        if seconds[count] < WORTHWHILE * seconds[best]:
            best = count
    return best


def decode_times(
    executor: DirectExecutor, steps: int, clock: Callable[[], float] = time.perf_counter
) -> list[float]:
    """Seconds of each of some decode steps of up to ``ROWS`` sequences, after two others."""
    capacity = executor.capacity
    rows = min(ROWS, capacity.max_num_seqs, capacity.num_blocks, capacity.max_num_batched_tokens)
    steps = min(steps, capacity.block_size - 2, capacity.max_model_len - 2)
    token = np.zeros(1, "<i4").tobytes()
    greedy = SlotSampling(0.0, 0, 1.0, 0, 0)
    added = [NewSlot(slot, token, 1, 0, [slot], greedy) for slot in range(rows)]
    chunks = [Chunk(slot, 0, 1, True, []) for slot in range(rows)]
    executor.execute(StepPlan(0, 1, True, [], added, [], chunks))
    seconds = []
    for step in range(2, 3 + max(1, steps)):
        begun = clock()
        executor.execute(StepPlan(0, step, False, [], [], [], []))
        seconds.append(clock() - begun)
    executor.reset()
    return seconds[1:]
