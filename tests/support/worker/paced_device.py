"""A device and a host whose work takes fixed times: what steps with drafts gain, without waiting.

The executor, its budget and its proposer are those of a GPU; kernels are plain Python, tokens are
those of given texts, and a clock stands still but for what is said to take time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from torch import Tensor

from penstock.kernels.gpu.guessed_drafts import (
    COUNT,
    DRAFTS,
    DRAWN,
    KNOWN,
    ROW,
    SLOT,
    TOKENS,
    accepted,
    placed,
)
from penstock.protocol.wire.messages.steps import Chunk, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.gpu import (
    batch_state,
    draft_draws,
    drafted_rows,
    drafting_executor,
    executor,
)
from penstock.services.worker.gpu.drafting_executor import DraftingGpuExecutor
from penstock.services.worker.speculation.drafting import Drafting, Guess

Text = Callable[[int, int], int]
"""(slot, position) → token."""
PROMPT = 64


class Pace(NamedTuple):
    """Seconds."""

    device: float
    """Of a step without drafts."""
    host: float
    """Of its launch."""
    depth: int
    """Steps under way."""
    row: float = 2e-6
    drafted: float = 1.15
    """How many times as long a step with drafts takes the device."""
    host_drafted: float = 150e-6
    """What its launch takes longer."""
    look: float = 10e-6
    """What looking for a row's drafts takes the host."""
    noise: float = 0.0
    """Standard deviation of the device's times, as a share; of a hundred steps with noise one is
    held up for three steps more."""


class Clock:
    now = 0.0

    def perf_counter(self) -> float:
        return self.now


class PacedEvent:
    def __init__(self, clock: Clock, at: float) -> None:
        self._clock, self.at = clock, at

    def query(self) -> bool:
        return self._clock.now >= self.at

    def synchronize(self) -> None:
        self._clock.now = max(self._clock.now, self.at)

    def elapsed_time(self, other: PacedEvent) -> float:
        return 1e3 * (other.at - self.at)


def _scatter(array: Tensor, changes: Tensor, count: int) -> None:
    packed = changes.numpy()
    array.numpy()[packed[:count]] = packed[count : 2 * count]


class PacedDevice:
    """Takes the place of an executor's device."""

    def __init__(
        self, executor_: DraftingGpuExecutor, pace: Pace, patch: pytest.MonkeyPatch
    ) -> None:
        self.clock, self._pace, self._executor = Clock(), pace, executor_
        self.text: Text = lambda slot, position: 0
        self._busy_until, self._drafts = 0.0, 0
        self._chance = random.Random(1)
        for module in (executor, drafting_executor):
            patch.setattr(module, "time", self.clock)
        patch.setattr(batch_state, "scatter", _scatter)
        patch.setattr(drafted_rows, "place_drafts", self._place)
        patch.setattr(drafted_rows, "accept_drafts", self._accept)
        patch.setattr(draft_draws.DraftDraws, "draw", self._draw_drafts)
        patch.setattr(draft_draws.DraftDraws, "warm_up", lambda draws: None)
        patch.setattr(drafted_rows.DraftedRows, "warm_up", lambda rows, *given: None)
        patch.setattr(executor_._logprobs, "of_drafts", lambda *rows: None)
        patch.setattr(executor_, "_event", self._event)
        for name in ("body", "head"):
            patch.setattr(executor_.decoder, name, lambda *rows, **more: None)
        patch.setattr(executor_.decoder, "draw", self._draw)

    def speculate(self, drafting: Drafting, patch: pytest.MonkeyPatch) -> None:
        """From now on there are drafts."""
        guess = drafting.guess

        def looked(step: Any, *more: Any) -> list[Guess] | None:
            self.clock.now += self._pace.look * len(step.decoding)
            return guess(step, *more)

        patch.setattr(drafting, "guess", looked)
        self._executor.speculate(drafting)

    def _event(self, timed: bool) -> PacedEvent:
        pace, drafts, self._drafts = self._pace, self._drafts, 0
        self.clock.now += pace.host + (pace.host_drafted if drafts else 0.0)
        took = pace.device * (pace.drafted if drafts else 1.0) + pace.row * drafts
        if pace.noise:
            held_up = 3.0 if self._chance.random() < 0.01 else 0.0
            took *= max(0.1, 1 + held_up + self._chance.gauss(0.0, pace.noise))
        self._busy_until = max(self.clock.now, self._busy_until) + took
        return PacedEvent(self.clock, self._busy_until)

    def _draw(self, rows: int) -> None:
        state, result = self._executor._state, self._executor.decoder.space.result
        for row, slot in enumerate(state.sample_slots[:rows].tolist()):
            state.position[slot] += 1
            state.num_output[slot] += 1
            result[0, row] = self.text(slot, int(state.position[slot]))
            state.last_token[slot] = result[0, row]

    def _place(
        self, planned: Any, entries: Tensor, last: Tensor, position: Tensor, tables: Tensor,
        rows: Any, outcome: Any, count: int, size: int,
    ) -> None:  # fmt: skip
        self._drafts = int((planned.ahead[:count] > 0).sum())
        for entry, live in zip(entries.tolist(), outcome.live, strict=True):
            if entry[SLOT] < 0:
                continue
            here, guessed = int(position[entry[SLOT]]), entry[TOKENS : TOKENS + entry[COUNT]]
            drafts = placed(guessed, here - entry[KNOWN], int(last[entry[SLOT]]), entry[DRAFTS])
            live.fill_(-1 if drafts is None else len(drafts))
            for at, token in enumerate(drafts or []):
                rows.tokens[entry[ROW] + at] = token
        ahead = planned.ahead[:count]
        rows.positions[:count] = position[planned.slots[:count].clamp(min=0)] + ahead

    def _draw_drafts(
        self, logits: Tensor, slots: Sequence[int], ahead: Any, ring: int, **more: Any
    ) -> Tensor:
        rows, draws = self._executor._drafted.placed, self._executor._draws
        later = self._executor._drafted._lists.ahead.nonzero().flatten().tolist()
        for number, (row, slot) in enumerate(zip(later, slots, strict=False)):
            draws.result[0, number] = self.text(int(slot), int(rows.positions[row]) + 1)
        return draws._results[ring].copy_(draws.result)

    def _accept(
        self, entries: Tensor, last: Tensor, position: Tensor, outputs: Tensor, tokens: Tensor,
        result: Tensor, drawn: Tensor, outcome: Any,
    ) -> None:  # fmt: skip
        for number, entry in enumerate(entries.tolist()):
            slot = entry[SLOT]
            if slot < 0:
                continue
            live = max(0, int(outcome.live[number]))
            drafts = tokens[entry[ROW] : entry[ROW] + live].tolist()
            draws = [int(last[slot]), *drawn[0, entry[DRAWN] : entry[DRAWN] + live].tolist()]
            count = accepted(drafts, draws, [0] * len(draws))
            last[slot] = draws[count]
            position[slot] += count
            outputs[slot] += count
            outcome.counts[number] = 1 + count

    def run(self, batch: int, tokens: int, epoch: int, corpus: bytes = b"") -> float:
        """Seconds that so many tokens take, of each of ``batch`` texts. corpus: whose they are; by
        default each run's own."""
        self._executor.reset()
        size = self._executor.capacity.block_size
        blocks = -(-(PROMPT + tokens) // size)
        added, chunks = list[NewSlot](), list[Chunk]()
        for slot in range(batch):
            prompt = np.array([self.text(slot, at) for at in range(PROMPT)], "<i4").tobytes()
            held = list(range(slot * blocks, (slot + 1) * blocks))
            most, asked = PROMPT + tokens, SlotSampling(0.6, 0, 1.0, slot).packed()
            whose = corpus or b"%d" % epoch
            added.append(NewSlot(slot, prompt, PROMPT, 0, held, asked, most=most, corpus=whose))
            chunks.append(Chunk(slot, 0, PROMPT, True, []))
        began, got, step = self.clock.now, np.zeros(batch, np.int64), 1
        self._executor.launch(StepPlan(epoch, 1, True, [], added, [], chunks))
        while got.min() < tokens:
            while self._executor.in_flight < self._pace.depth:
                step += 1
                self._executor.launch(StepPlan(epoch, step, False, [], [], [], []))
            result = self._executor.finished(wait=True)
            assert result is not None
            got += np.frombuffer(result.counts, np.uint8) if result.counts else 1
        return self.clock.now - began
