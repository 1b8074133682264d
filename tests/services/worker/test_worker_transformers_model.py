"""Models computed by transformers' code give what that library's own generation gives."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from plan_driver import PlanDriver
from tiny_models import FAMILIES, OTHERS, generated, some_prompts

from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.layer_groups import group_layers
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.models.registry import is_native
from penstock.services.worker.models.transformers_model import (
    TransformersModel,
    load_transformers_model,
)

CPU = torch.device("cpu")
Folder = Callable[[str], Path]
NATIVE_TOO = ("gemma2", "granite", "smollm3", "cohere2")
"""Windows, soft caps, multipliers, layers without rotary embedding."""


def load(folder: Path) -> TransformersModel:
    info = read_model_info(folder)
    return load_transformers_model(info, torch.float32, CPU, random=False, seed=0)


@pytest.mark.parametrize("variant", [*OTHERS, *NATIVE_TOO])
def test_greedy_tokens_equal_those_of_transformers(variant: str, tiny_folder: Folder) -> None:
    prompts = some_prompts([1, 5, 33, 150])
    folder = tiny_folder(variant)
    info = read_model_info(folder)
    assert is_native(info) == (variant in FAMILIES)
    model = load(folder)
    groups = group_layers(model.caches).groups
    capacity = EngineSizes(300, 8, 4, 64, 512, info.vocab_size, groups=groups)
    executor = ModelExecutor(model, capacity)
    got = PlanDriver(executor, 1).run(prompts, 12, chunk=24, preemptions=3)
    assert got == generated(variant, prompts, 12)


@pytest.mark.parametrize(
    ("variant", "reason"),
    [
        ("bloom", "0 of 2 layers attend"),
        ("falcon", "0 of 2 layers attend"),
        ("mamba", "another state than keys and values"),
        ("jamba", "another state than keys and values"),
        ("gpt-oss", "s_aux"),
        ("deepseek-v3", "keys of 192 and values of 128"),
    ],
)
def test_a_model_that_cannot_be_served_is_refused_with_the_reason(
    variant: str, reason: str, tiny_folder: Folder
) -> None:
    with pytest.raises(BadModelFolder, match=rf"config\.json: architecture.*{reason}"):
        load(tiny_folder(variant))


def test_an_architecture_that_the_library_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(
        '{"architectures": ["NoSuchForCausalLM"], "model_type": "no_such", "vocab_size": 10, '
        '"max_position_embeddings": 10}'
    )
    info = read_model_info(tmp_path)
    with pytest.raises(BadModelFolder, match=r"NoSuchForCausalLM.*transformers \d.*no_such"):
        load_transformers_model(info, torch.float32, CPU, random=True, seed=0)


def test_longrope_beyond_the_trained_length_is_refused(tiny_folder: Folder) -> None:
    model = load(tiny_folder("phi3-longrope"))
    model.prepare(512)
    with pytest.raises(BadModelFolder, match=r"longest sequence of a batch.*--max-model-len 512"):
        model.prepare(513)
