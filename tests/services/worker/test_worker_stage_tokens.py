"""When the first stage of a pipeline waits for the tokens that the last one draws."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from penstock.services.worker.gpu.batch_state import RING, BatchState
from penstock.services.worker.gpu.stage_tokens import StageTokens


class LastStage:
    """Draws 100, 101, … for the rows of step 1, 200, … for those of step 2 and so on."""

    def __init__(self) -> None:
        self.waited: list[int] = []
        self._steps = 0

    def receive_tokens(self, tokens: Tensor, free: Any) -> Callable[[], None]:
        self._steps += 1
        step = self._steps

        def wait() -> None:
            self.waited.append(step)
            tokens.copy_(100 * step + torch.arange(len(tokens)))

        return wait


class FirstStage:
    def __init__(self, slots: int) -> None:
        self.last_stage = LastStage()
        self._state = SimpleNamespace(
            last_token=torch.zeros(slots, dtype=torch.int32),
            sample_slots=torch.full((slots,), -1, dtype=torch.int32),
        )
        self.tokens = StageTokens(cast(BatchState, self._state), self.last_stage)

    def step(self, decoding: list[int], sampled: list[int]) -> list[int]:
        """The last tokens that the step finds."""
        self.tokens.take(np.array(decoding, np.int64))
        found = self._state.last_token[decoding].tolist()
        self._state.sample_slots.fill_(-1)[: len(sampled)] = torch.tensor(sampled)
        self.tokens.expect(np.array(sampled, np.int64))
        return found


def test_a_step_waits_for_the_tokens_of_its_own_slots_and_those_before_alone() -> None:
    stage = FirstStage(4)
    stage.step([], [0, 2])
    stage.step([], [1, 3])
    assert stage.last_stage.waited == []
    assert stage.step([0, 2], [0, 2]) == [100, 101]
    assert stage.last_stage.waited == [1]
    assert stage.step([1, 3], [1, 3]) == [200, 201]
    assert stage.step([0, 2], [0, 2]) == [300, 301]
    assert stage.last_stage.waited == [1, 2, 3]


def test_a_prompt_that_ends_in_another_micro_batch_s_step_is_waited_for_where_it_is_decoded() -> (
    None
):
    stage = FirstStage(4)
    stage.step([], [0])
    stage.step([], [1])
    assert stage.step([0], [0, 3]) == [100]
    assert stage.step([1, 3], [1, 3]) == [200, 301]


def test_as_many_steps_are_waited_for_as_there_are_buffers() -> None:
    stage = FirstStage(1 + RING)
    for slot in range(1 + RING):
        stage.step([], [slot])
    assert stage.last_stage.waited == [1]
    assert stage.step([RING], [RING]) == [100 * (1 + RING)]


def test_nothing_is_waited_for_behind_a_reset() -> None:
    stage = FirstStage(2)
    stage.step([], [0])
    stage.tokens.forget()
    assert stage.step([0], [0]) == [0]
    assert stage.last_stage.waited == []
