"""Drives an executor whose steps are launched before those ahead of them are known to be over."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import torch

from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu.executor import GpuExecutor


class LateEvent:
    """Passes when it is waited for, as far as the host hears."""

    def __init__(self) -> None:
        self._passed = False

    def query(self) -> bool:
        return self._passed

    def elapsed_time(self, other: LateEvent) -> float:
        return 1.0

    def synchronize(self) -> None:
        self._passed = True
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def make_late(executor: GpuExecutor) -> None:
    """Let the host hear of steps only when it waits for them."""
    executor._event = lambda timed: LateEvent()  # type: ignore[assignment,return-value,method-assign]


class _Sequence:
    def __init__(self, prompt: list[int], sampling: SlotSampling) -> None:
        self.prompt, self.sampling = prompt, sampling
        self.output: list[int] = []
        self.slot, self.blocks = -1, list[int]()
        self.bound = self.rows = 0
        """Positions that it has at most, and how often it began."""
        self.decoding = False


class AheadDriver:
    """Plans as the scheduler does: positions for the most that rows may bring, and as many blocks;
    counts are known when a step is over."""

    def __init__(self, executor: GpuExecutor, depth: int = 2, seed: int = 0) -> None:
        """depth: steps under way."""
        self._executor, self._depth, self._random = executor, depth, random.Random(seed)
        self._free = list(range(executor.capacity.num_blocks))
        self._slots = list(range(executor.capacity.max_num_seqs))
        self._random.shuffle(self._free)
        self._flight: deque[list[tuple[_Sequence, int]]] = deque()
        self._step = 0
        self.row_counts: list[int] = []
        """Tokens of each row of each step."""
        self.ahead = 0
        """Steps with drafts that were launched while others were under way."""

    def _take(self, one: _Sequence, positions: int) -> list[int]:
        missing = -(-positions // self._executor.capacity.block_size) - len(one.blocks)
        taken = [self._free.pop() for _ in range(missing)]
        one.blocks += taken
        return taken

    def _drop(self, one: _Sequence) -> int:
        self._free += one.blocks
        self._random.shuffle(self._free)
        slot, one.slot, one.blocks, one.decoding = one.slot, -1, [], False
        one.rows += 1
        self._slots.append(slot)
        return slot

    def run(
        self,
        prompts: list[list[int]],
        tokens: int,
        samplings: list[SlotSampling],
        preempted: float = 0.0,
    ) -> list[list[int]]:
        """Outputs of all prompts. preempted: share of the steps in which a sequence loses its
        slot, and takes one again later."""
        every = [_Sequence(*pair) for pair in zip(prompts, samplings, strict=True)]
        waiting, active, gone = deque(every), list[_Sequence](), list[int]()
        while waiting or active or self._flight:
            if active and self._random.random() < preempted:
                victim = self._random.choice(active)
                active.remove(victim)
                gone.append(self._drop(victim))
                waiting.append(victim)
            for one in [one for one in active if self._is_planned(one, tokens)]:
                active.remove(one)
                gone.append(self._drop(one))
            if waiting or active or gone:
                self._launch(waiting, active, gone, tokens)
                gone = []
            if len(self._flight) > self._depth or (self._flight and not (waiting or active)):
                self._collect(tokens)
            for one in [one for one in active if len(one.output) == tokens]:
                active.remove(one)
                gone.append(self._drop(one))
            waiting = deque(one for one in waiting if len(one.output) < tokens)
        return [one.output for one in every]

    def _is_planned(self, one: _Sequence, tokens: int) -> bool:
        """Whether all of it is under way; known ahead of results where rows bring one token."""
        alone = self._executor.capacity.max_row_tokens == 1 and one.decoding
        return alone and one.bound >= len(one.prompt) + tokens - 1

    def _launch(
        self, waiting: deque[_Sequence], active: list[_Sequence], gone: list[int], tokens: int
    ) -> None:
        self._step += 1
        most, rows, grown = self._executor.capacity.max_row_tokens, [], list[int]()
        for one in sorted((one for one in active if one.decoding), key=lambda one: one.slot):
            one.bound += most
            for block in self._take(one, min(one.bound, len(one.prompt) + tokens - 1)):
                grown += [one.slot, block]
            rows.append(one)
        added, chunks = list[NewSlot](), list[Chunk]()
        for _ in range(min(1, len(waiting), len(self._slots))):
            one = waiting.popleft()
            if any(one is row for step in self._flight for row, _ in step):
                waiting.append(one)  # its results are applied first
                continue
            one.slot, known = self._slots.pop(0), one.prompt + one.output
            blocks, one.decoding = self._take(one, len(known)), True
            one.bound = len(known) + most - 1
            added.append(
                NewSlot(
                    one.slot, np.array(known, "<i4").tobytes(), len(one.prompt), 0, [],
                    one.sampling.packed(), most=len(one.prompt) + tokens, corpus=b"corpus",
                )
            )  # fmt: skip
            chunks.append(Chunk(one.slot, 0, len(known), True, blocks))
            active.append(one)
            rows.append(one)
        full = self._step == 1
        self._executor.launch(StepPlan(1, self._step, full, gone, added, grown, chunks))
        flight = self._executor._flight[-1]
        self.ahead += getattr(flight, "drafts", None) is not None and bool(self._flight)
        self._flight.append([(one, one.rows) for one in rows])

    def _collect(self, tokens: int) -> None:
        result, rows = self._executor.finished(wait=True), self._flight.popleft()
        assert result is not None and not result.bad_rows and not result.failures, result
        drawn = np.frombuffer(result.tokens, "<i4").tolist()
        counts = list(result.counts) or [1] * len(rows)
        self.row_counts += counts
        for (one, begun), count in zip(rows, counts, strict=True):
            brought = [drawn.pop(0) for _ in range(count)]
            if begun == one.rows and one.decoding:
                one.bound -= self._executor.capacity.max_row_tokens - count
            one.output = (one.output + brought)[:tokens]
        assert not drawn
