"""Steps of so many rows that they are filled up once, not for each product."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.worker.plan_driver import PlanDriver
from support.worker.tiny_models import some_prompts

from penstock.kernels import activation
from penstock.kernels.activation import silu_and_mul
from penstock.kernels.linear import padded_rows
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import Hidden, ModelExecutor
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.slots import PlannedStep
from penstock.services.worker.step_inputs import MANY_ROWS, RowPadding

LENGTH = 530


class Recorder(ModelExecutor):
    """Keeps the logits of the first sampled row of each step."""

    logits: list[torch.Tensor]  # type: ignore[assignment]

    def row_logits(self, step: PlannedStep, hidden: Hidden) -> torch.Tensor:
        logits = super().row_logits(step, hidden)
        if len(step.sampled):
            self.logits.append(logits[0].clone())
        return logits


def test_many_rows_of_packed_products_are_filled_up_to_what_these_need() -> None:
    packed, plain = RowPadding(1, 2, packed=True), RowPadding(4, 1)
    for rows in (MANY_ROWS + 1, LENGTH, 640, 1900, 2048):
        assert rows + packed.missing(rows) == padded_rows(rows)
        assert (rows + plain.missing(rows)) % 4 == 0
    assert [packed.missing(rows) for rows in (1, 2, 77, MANY_ROWS)] == [1, 0, 0, 0]


def test_rows_of_a_step_that_is_filled_up_have_the_bits_of_shorter_steps(
    tiny_folder: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []

    def counted(x: torch.Tensor) -> torch.Tensor:
        computed.append(len(x))
        return silu_and_mul(x)

    monkeypatch.setattr(activation, "silu_and_mul", counted)
    info = read_model_info(tiny_folder("qwen3"))
    model = load_model(info, torch.float32, torch.device("cpu"), lambda _: None, longest=640)
    groups = group_layers(model.caches).groups
    executor = Recorder(model, EngineSizes(90, 16, 2, 640, 640, info.vocab_size, groups=groups))
    found = []
    for chunk in (LENGTH, 300):
        executor.reset()
        executor.logits = []
        (tokens,) = PlanDriver(executor, 0).run(some_prompts([LENGTH]), 3, chunk=chunk)
        found.append((tokens, executor.logits))
    (tokens, logits), (others, other_logits) = found
    assert tokens == others and len(logits) == len(other_logits) == 3
    assert all(torch.equal(a, b) for a, b in zip(logits, other_logits, strict=True))
    assert computed[0] == (padded_rows(LENGTH) if model.packed else 532)
