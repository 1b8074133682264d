"""Steps of an executor, timed: the step, the device's share of it, the host's, the kernels.

A batch of equal sequences decodes without a change, so a step is what every step costs at least;
blocks for all its steps are taken beforehand. Beside them each step may compute the same prompts,
which begin and end with it.
"""

from __future__ import annotations

import math
import re
import time
from collections import defaultdict
from itertools import pairwise
from statistics import median

import msgspec
import numpy as np

from penstock.loadtest.recordings.timeline import Span, decoded
from penstock.protocol.config import ConfigError
from penstock.protocol.process.trace import DEVICE, MAX_SECONDS, TRACE
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.membership import Trace
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.executor import Executor
from penstock.services.worker.memory import blocks_for

_WARM_UP = 20
PROMPT_TOKENS = 1024
"""A step's prefill is cut into prompts of so many tokens, and one of the rest."""
_TEMPLATE = re.compile(r"<.*")
_NAME_LENGTH = 48


class StepCost(msgspec.Struct, frozen=True):
    """Microseconds of one step; ``None`` where the device tells nothing."""

    step_us: float
    """From one step's end to the next one's, while the next ones are launched already."""
    device_us: float | None
    """From its first kernel's start to its last one's end."""
    between_percent: float | None
    """Share of a step in which the device did nothing, between the last kernel and the next."""
    launch_us: float
    """The host's work for it."""


class KernelTime(msgspec.Struct, frozen=True):
    name: str
    calls: float
    """In a step."""
    us: float
    """All calls of a step together; calls that overlap count twice."""


class StepTimer:
    """``rows`` sequences with ``context`` positions each, on an executor that has nothing else."""

    def __init__(
        self,
        executor: Executor,
        rows: int,
        context: int,
        steps: int,
        temperature: float,
        common: int = 0,
        prefill: int = 0,
        *,
        warm_up: int = _WARM_UP,
    ) -> None:
        """common: positions of the context that lie in the same blocks for all; prefill: tokens of
        prompts in each step; warm_up: steps ahead of those. Raises ``ConfigError`` if ``steps``
        steps of it do not fit into the executor."""
        capacity = executor.capacity
        positions = context + steps + warm_up
        shared = _groups(capacity) * (min(common, context) // capacity.block_size)
        each = _blocks_of(positions, capacity) - shared
        prompts = prompts_of(prefill)
        of_rows = shared + rows * each
        needed = of_rows + sum(_blocks_of(size, capacity) for size in prompts)
        _check_fits(capacity, max(positions, *prompts, 0), needed, rows + prefill)
        self._executor, self._temperature = executor, temperature
        self._step = 1
        self._prompts: list[NewSlot] = []
        self._chunks: list[Chunk] = []
        self._gone: list[int] = []
        executor.reset()
        self._add_prompts(prompts, rows, of_rows)
        ids = _token_ids(context + 1, capacity)
        own = range(shared, of_rows)
        added = [
            NewSlot(
                slot, ids, context + 1, context,
                [*range(shared), *own[slot * each : (slot + 1) * each]],
                SlotSampling(temperature, 0, 1.0, slot).packed(),
            )
            for slot in range(rows)
        ]  # fmt: skip
        chunks = [Chunk(slot, context, 1, True, []) for slot in range(rows)]
        executor.launch(StepPlan(1, 1, True, [], added, [], chunks))
        self.run(warm_up)

    def _add_prompts(self, sizes: list[int], slot: int, block: int) -> None:
        """Of every step. sizes: in tokens; slot, block: the first ones that are free."""
        capacity = self._executor.capacity
        for size in sizes:
            ids = _token_ids(size, capacity)
            sampling = SlotSampling(self._temperature, 0, 1.0, slot)
            blocks = list(range(block, block + _blocks_of(size, capacity)))
            self._prompts.append(NewSlot(slot, ids, size, 0, [], sampling.packed()))
            self._chunks.append(Chunk(slot, 0, size, True, blocks))
            slot, block = slot + 1, block + len(blocks)

    def _next(self) -> StepPlan:
        self._step += 1
        gone, self._gone = self._gone, [new.slot for new in self._prompts]
        return StepPlan(1, self._step, False, gone, self._prompts, [], self._chunks)

    def run(self, steps: int) -> tuple[list[float], list[float]]:
        """Seconds of each launch, and the times at which the steps' results came."""
        executor, clock = self._executor, time.perf_counter
        launches, ends = [], []
        for _ in range(steps):
            if executor.in_flight == executor.max_in_flight:
                executor.finished(wait=True)
                ends.append(clock())
            plan = self._next()
            began = clock()
            executor.launch(plan)
            launches.append(clock() - began)
        while executor.finished(wait=True) is not None:
            ends.append(clock())
        return launches, ends

    def measure(self, steps: int) -> StepCost:
        launches, ends = self.run(steps)
        step = (ends[-1] - ends[0]) / max(1, len(ends) - 1)
        device, between = self._on_the_device(steps)
        return StepCost(step * 1e6, device, between, median(launches) * 1e6)

    def _on_the_device(self, steps: int) -> tuple[float | None, float | None]:
        """Microseconds of a step, and the share of the time between steps; from the recorder that
        ``penstock trace`` reads."""
        TRACE.ask(Trace("this process", MAX_SECONDS), 0.0)
        self.run(steps)
        spans: list[Span] = []
        while (piece := TRACE.next_piece(math.inf)) is not None:
            spans += decoded(piece.names, piece.events)
            if not piece.more:
                break
        work = [span for span in spans if span.lane == DEVICE]
        if len(work) < 2:
            return None, None
        busy = [span.end - span.start for span in work]
        gaps = sum(later.start - earlier.end for earlier, later in pairwise(work))
        return median(busy) / 1e3, 100 * gaps / (work[-1].end - work[0].start)

    def close(self) -> None:
        self._executor.reset()


def _groups(capacity: EngineSizes) -> int:
    """Of layers, each of which has blocks of its own."""
    return max(1, len(capacity.groups))


def _blocks_of(tokens: int, capacity: EngineSizes) -> int:
    """Of a sequence, over all groups."""
    return _groups(capacity) * blocks_for(tokens, capacity.block_size)


def _token_ids(count: int, capacity: EngineSizes) -> bytes:
    """int32 [count]."""
    return (np.arange(count) % capacity.vocab_size).astype("<i4").tobytes()


def _check_fits(capacity: EngineSizes, positions: int, blocks: int, tokens: int) -> None:
    """positions: of a sequence; blocks: of all; tokens: of a step. Raises ``ConfigError``."""
    if positions > capacity.max_model_len:
        raise ConfigError(f"{positions} positions; max_model_len is {capacity.max_model_len}")
    if blocks > capacity.num_blocks:
        raise ConfigError(f"{blocks} KV blocks are needed, there are {capacity.num_blocks}")
    if tokens > capacity.max_num_batched_tokens:
        most = capacity.max_num_batched_tokens
        raise ConfigError(f"{tokens} tokens a step; max_num_batched_tokens is {most}")


def prompts_of(prefill: int) -> list[int]:
    """Lengths of the prompts that so many tokens of prefill are cut into."""
    whole, rest = divmod(prefill, PROMPT_TOKENS)
    return [PROMPT_TOKENS] * whole + [rest] * (rest > 0)


def kernel_times(timer: StepTimer, steps: int) -> list[KernelTime]:
    """The kernels of a step by time, longest first; empty without a CUDA device."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    if not torch.cuda.is_available():
        return []
    with profile(activities=[ProfilerActivity.CUDA]) as found:
        timer.run(steps)
        torch.cuda.synchronize()
    calls: dict[str, int] = defaultdict(int)
    spent: dict[str, float] = defaultdict(float)
    for event in found.events() or []:
        if event.device_type.name == "CUDA":
            name = _TEMPLATE.sub("", event.name.removeprefix("void "))[:_NAME_LENGTH]
            calls[name] += 1
            spent[name] += event.time_range.elapsed_us()
    every = [KernelTime(name, calls[name] / steps, spent[name] / steps) for name in spent]
    return sorted(every, key=lambda kernel: -kernel.us)
