"""Samplers of slots: as asked, alone as among others, and after a slot was lost."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from support.worker.asked_slots import asking
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.sampler_slots import EVERY_SAMPLER, MIROSTAT, staged
from support.worker.tiny_models import generated, some_prompts

from penstock.kernels.sampling.samplers.mirostat import bound_after
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import Chunk, Dry, NewSlot, SlotSampling, StepPlan
from penstock.services.worker.block_tables import PlanError
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model

Folder = Callable[[str], Path]
Run = Callable[..., list[list[int]]]
LENGTHS = [9, 4, 12, 7, 5, 6, 8, 3, 10]


@pytest.fixture
def executor(tiny_folder: Folder) -> ModelExecutor:
    info = read_model_info(tiny_folder("qwen3"))
    capacity = EngineSizes(120, 16, 12, 64, 256, info.vocab_size)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    return ModelExecutor(model, capacity)


@pytest.fixture
def run(executor: ModelExecutor) -> Run:
    def outputs(
        prompts: list[list[int]], samplings: list[SlotSampling], count: int = 16, *,
        preemptions: int = 0, seed: int = 1,
    ) -> list[list[int]]:  # fmt: skip
        executor.reset()
        driver = PlanDriver(executor, seed)
        found = driver.run(prompts, count, samplings=samplings, preemptions=preemptions)
        assert not driver.bad
        return found

    return outputs


def test_a_row_draws_the_same_alone_in_a_batch_and_after_it_lost_its_slot(run: Run) -> None:
    prompts = some_prompts([*LENGTHS, 5])
    together = run(prompts, [*EVERY_SAMPLER, GREEDY], preemptions=7, seed=4)
    assert together[-1] == generated("qwen3", prompts[-1:], 16)[0]
    for prompt, sampling, wanted in zip(prompts, EVERY_SAMPLER, together, strict=False):
        assert run([prompt], [sampling]) == [wanted]


def test_a_bound_of_mirostat_is_learned_again_from_the_output_to_the_last_bit(
    executor: ModelExecutor, run: Run
) -> None:
    (prompt,) = some_prompts([9])
    (output,) = run([prompt], [MIROSTAT], 24)
    steered = executor._adjuster.steered
    (slot,) = steered.asks.nonzero()[0].tolist()
    bound = float(steered.bound[slot])
    assert abs(bound - bound_after(4.0, 0.4, [])) > 0.01
    executor.reset()
    # All but the last token, whose surprise follows from the draw itself.
    tokens = torch.tensor([*prompt, *output[:-1]], dtype=torch.int32).numpy().tobytes()
    new = NewSlot(2, tokens, len(prompt), 0, [], MIROSTAT.packed())
    length, half = new.length, new.length - 11
    first = StepPlan(5, 1, True, [], [new], [], [Chunk(2, 0, half, False, [4, 5, 6])])
    executor.execute(first)
    result = executor.execute(StepPlan(5, 2, False, [], [], [], [Chunk(2, half, 11, True, [])]))
    assert torch.frombuffer(bytearray(result.tokens), dtype=torch.int32).tolist() == output[-1:]
    assert length == len(prompt) + 23
    assert float(steered.bound[2]) == bound


def test_a_slot_that_mirostat_steers_does_not_begin_behind_its_output(
    executor: ModelExecutor,
) -> None:
    new = NewSlot(0, bytes(4 * 40), 8, 16, [1], MIROSTAT.packed())
    with pytest.raises(PlanError, match="how probable its output was"):
        executor.execute(StepPlan(1, 1, True, [], [new], [], []))


def test_no_ngram_comes_twice(run: Run) -> None:
    (prompt,) = some_prompts([9])
    (found,) = run([prompt], [asking(no_repeat_ngram=2)], 60, preemptions=2)
    text = [*prompt, *found]
    pairs = list(pairwise(text))
    repeated = [pair for at, pair in enumerate(pairs) if pair in pairs[:at]]
    assert not [pair for pair in repeated if pair[1] in found[1:]]


def test_dry_keeps_a_text_from_repeating_itself_where_it_would(run: Run) -> None:
    (prompt,) = some_prompts([9])
    biases = {"biased": bytes([7, 0, 0, 0, 9, 0, 0, 0]), "biases": b"\0\0\xc8B\0\0\xc8B"}
    (plain,) = run([prompt], [asking(**biases)], 20)  # 7 and 9 alone, by a bias of 100
    (found,) = run([prompt], [asking(dry=Dry(90.0, 4.0, 1), **biases)], 20)
    assert set(plain) <= {7, 9}
    assert len(set(found)) > 4


def test_a_neighbour_with_samplers_changes_no_row_that_has_none(run: Run) -> None:
    prompts = some_prompts([5, 6, 7])
    drawn = asking(1.3, seed=8)
    (alone,) = run(prompts[1:2], [drawn])
    together = run(prompts, [EVERY_SAMPLER[0], drawn, staged(("typical_p", [0.4]))])
    assert together[1] == alone
