"""A model that is divided among ranks gives the tokens that it gives on one worker."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from plan_driver import GREEDY, PlanDriver
from ranks_in_threads import ranks_of
from tiny_models import some_prompts

from penstock.protocol.logprobs import PackedLogprobs
from penstock.protocol.model_info import read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_weights import load_model

Folder = Callable[[str], Path]
LAYOUTS = [
    # Variant of tiny_models, tensor, pipeline
    ("llama3", 2, 1),
    ("llama3", 4, 1),  # two KV heads, each on two ranks
    ("llama-tied-biases", 2, 1),
    ("qwen2-tied", 4, 1),  # one KV head
    ("qwen3", 2, 2),
    ("qwen3-biased", 1, 2),
    ("gemma2", 2, 1),
    ("gemma2", 2, 2),
    ("gemma3", 2, 3),  # seven layers: 3, 2, 2
]
OTHERS = [
    ("phi3", 2, 1),  # stored in one piece: queries, keys, values; gate, up
    ("mistral", 2, 1),
    ("granite", 2, 1),
    ("smollm3", 1, 4),
    ("glm", 2, 1),  # neighbouring pairs are rotated
    ("glm4", 2, 2),
    ("starcoder2", 2, 1),  # biases behind the sums
    ("exaone4", 2, 2),
    ("cohere", 2, 1),  # norms with a weight for each head
    ("cohere2", 1, 3),
    ("olmo2", 1, 2),
    ("granite-swa", 1, 3),
]
SEEDED = SlotSampling(0.8, 40, 0.95, 11, 0.02)
PENALISED = SlotSampling(
    0.7, 0, 1.0, 5, adjustments=SlotAdjustments(repetition=1.2, frequency=0.3, presence=0.1),
    logprobs=3,
)  # fmt: skip
SAMPLINGS = [GREEDY, SEEDED, PENALISED, SlotSampling(0.0, 0, 1.0, 0, logprobs=2)]


def alone(folder: Path, sizes: EngineSizes) -> ModelExecutor:
    model = load_model(read_model_info(folder), torch.float32, torch.device("cpu"), lambda note: None)
    return ModelExecutor(model, sizes)


def sizes_for(folder: Path) -> EngineSizes:
    info = read_model_info(folder)
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    groups = group_layers(model.caches).groups
    return EngineSizes(400, 8, 4, 96, 256, info.vocab_size, groups=groups)


def outputs(executor: Any) -> tuple[list[list[int]], PlanDriver]:
    """Greedy, seeded, penalised, with logprobs of prompts and outputs, in chunks, preempted."""
    driver = PlanDriver(executor, 3)
    got = driver.run(
        some_prompts([1, 40, 17, 70]), 12, samplings=SAMPLINGS, chunk=24, preemptions=3,
        prompt_logprobs=2,
    )  # fmt: skip
    return got, driver


def check_alike(ours: dict[Any, PackedLogprobs], theirs: dict[Any, PackedLogprobs]) -> None:
    assert ours.keys() == theirs.keys()
    for key, one in ours.items():
        first, second = (np.frombuffer(each.entries, "<f4") for each in (one, theirs[key]))
        np.testing.assert_allclose(first, second, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("variant", "tensor", "pipeline"),
    [*LAYOUTS, *(pytest.param(*one, marks=pytest.mark.slow) for one in OTHERS)],
)
def test_ranks_give_the_tokens_and_logprobs_of_one_worker(
    variant: str, tensor: int, pipeline: int, tiny_folder: Folder
) -> None:
    folder = tiny_folder(variant)
    sizes = sizes_for(folder)
    expected, of_one = outputs(alone(folder, sizes))
    with ranks_of(folder, tensor, pipeline, sizes) as ranks:
        got, of_all = outputs(ranks)
    assert got == expected
    check_alike(of_all.logprobs, of_one.logprobs)
    check_alike(of_all.prompt_logprobs, of_one.prompt_logprobs)
