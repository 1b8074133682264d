"""64 prompts of 1 to 700 tokens through the scheduler's core, for each model of each family: the
greedy tokens of transformers, with chunks, preemptions and a prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from msgspec.structs import replace
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.scheduled_executor import scheduled, work
from support.worker.tiny_models import FAMILIES, SIBLINGS, VARIANTS, generated, some_prompts

from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model

Folder = Callable[[str], Path]
OUTPUT, BUDGET = 24, 160
"""Tokens of an answer, and of a step."""
LONGROPE = ("phi3-longrope", "phi4-mini")
"""Whose rotary embedding depends on the longest sequence: 512 positions were trained."""
IN_SHORT = ("mistral",)
LENGTHS = [1 + 699 * number // 63 for number in range(64)]


def prompts_of(lengths: list[int]) -> list[list[int]]:
    """Every third prompt begins as the longest one does, for half of its length."""
    prompts = some_prompts(lengths, seed=3)
    longest = max(prompts, key=len)
    for number, prompt in enumerate(prompts):
        if number % 3 == 0:
            prompt[: len(prompt) // 2] = longest[: len(prompt) // 2]
    return prompts


def executor_for(folder: Path, longest: int, sequences: int) -> ModelExecutor:
    """With room for so many of the longest sequences, and steps of a part of a prompt."""
    info, cpu = read_model_info(folder), torch.device("cpu")
    model = load_model(info, torch.float32, cpu, lambda note: None, longest=longest)
    groups = group_layers(model.caches).groups
    sizes = EngineSizes(0, 8, 16, BUDGET, longest, info.vocab_size, groups=groups)
    blocks = sequences * sizes.sequence_blocks(longest)
    return ModelExecutor(model, replace(sizes, num_blocks=blocks))


def assert_exact(variant: str, folder: Path, lengths: list[int], longest: int = 1000) -> None:
    """By the scheduler's plans, with few blocks and the prefix cache; and by a driver that preempts
    at random."""
    prompts = prompts_of(lengths)
    works = [work(prompt, GREEDY, OUTPUT) for prompt in prompts]
    outputs, counters = scheduled(executor_for(folder, longest, 2), works)
    found = [outputs.tokens[number] for number in range(len(prompts))]
    assert found == generated(variant, prompts, OUTPUT, found)
    assert counters.prefix_hit_tokens and counters.steps > sum(lengths) // BUDGET
    driver = PlanDriver(executor_for(folder, longest, 16), seed=1)
    assert driver.run(prompts, OUTPUT, chunk=48, preemptions=20) == found


@pytest.mark.parametrize(
    "variant",
    [
        pytest.param(name, marks=[] if name in IN_SHORT else pytest.mark.slow)
        for name in {**FAMILIES, **SIBLINGS, **VARIANTS}
        if name not in LONGROPE
    ],
)
def test_long_and_short_prompts_give_the_tokens_of_transformers(
    variant: str, tiny_folder: Folder
) -> None:
    assert_exact(variant, tiny_folder(variant), LENGTHS)


@pytest.mark.slow
@pytest.mark.parametrize("variant", LONGROPE)
def test_either_set_of_longropes_factors_gives_the_tokens_of_transformers(
    variant: str, tiny_folder: Folder
) -> None:
    folder = tiny_folder(variant)
    assert_exact(variant, folder, [1 + 7 * number for number in range(64)], longest=512)
    assert_exact(variant, folder, [513 + 2 * number for number in range(64)])
