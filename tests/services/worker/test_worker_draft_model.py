"""Drafts of a draft model: one like the target is always right, any other changes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.worker.plan_driver import GREEDY, PlanDriver
from support.worker.tiny_models import some_prompts, write_model
from test_worker_drafted_rows import GRAMMARS, following_grammars, up_to_end
from test_worker_drafting_executor import ADJUSTED
from test_worker_eagle3 import drafting_by
from test_worker_model_executor import executor_for, silent

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.protocol.config import Config, ConfigError
from penstock.protocol.config.fields import DeviceConfig, ModelConfig, SpeculationConfig
from penstock.protocol.model_info import BadModelFolder, read_model_info
from penstock.protocol.wire.messages.steps import SlotAdjustments, SlotSampling
from penstock.services.worker.drafting_executor import DraftingExecutor
from penstock.services.worker.model_weights import load_model, random_model
from penstock.services.worker.speculation.draft_model import DraftModelDrafter
from penstock.services.worker.speculation.draft_shape import read_draft_shape
from penstock.services.worker.speculation.setup import make_drafter

Folder = Callable[[str], Path]
CPU = torch.device("cpu")
SAMPLINGS = [
    GREEDY,
    SlotSampling(1.0, 0, 1.0, 5),
    SlotSampling(0.8, 7, 0.9, 6, logprobs=2),
    SlotSampling(1.3, 0, 0.7, 7, min_p=0.05),
]


def with_draft_model(target: Path, *, alike: bool, seed: int = 3) -> DraftingExecutor:
    executor = executor_for(target, kind=DraftingExecutor)
    info = read_model_info(target)
    if alike:
        model = load_model(info, torch.float32, CPU, silent, longest=512)
    else:
        model = random_model(info, torch.float32, CPU, seed, 512)
    return drafting_by(executor, DraftModelDrafter(model, executor.slots))


def shares(executor: DraftingExecutor) -> list[float]:
    """Of the drafts of the model at each place those that were accepted."""
    counts = executor.drafting.counts  # type: ignore[union-attr]
    both = zip(counts.accepted["draft-model"], counts.drafted["draft-model"], strict=True)
    return [accepted / drafted for accepted, drafted in both if drafted]


@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.parametrize("variant", ["llama", "qwen3"])
def test_a_draft_model_like_the_target_is_right_and_another_changes_nothing(
    variant: str, alike: bool, tiny_folder: Folder
) -> None:
    folder, prompts = tiny_folder(variant), some_prompts([5, 33, 129, 64])
    plain = PlanDriver(executor_for(folder, kind=DraftingExecutor), 1)
    expected = plain.run(prompts, 24, samplings=SAMPLINGS, chunk=50)
    executor = with_draft_model(folder, alike=alike)
    driver = PlanDriver(executor, 2)
    assert driver.run(prompts, 24, samplings=SAMPLINGS, preemptions=3) == expected
    assert driver.logprobs == plain.logprobs
    if alike:
        assert min(shares(executor)) > 0.97
        assert max(driver.row_counts) == 5
    else:
        assert min(shares(executor)) < 0.97  # draws share their random numbers


def test_a_draft_model_drafts_beside_what_reads_the_text(tiny_folder: Folder) -> None:
    folder, prompts = tiny_folder("llama"), some_prompts([5, 9, 12, 7])
    samplings = [
        SlotSampling(0.9, 0, 1.0, 3, adjustments=SlotAdjustments(grammar=GRAMMARS[0]), logprobs=1),
        SlotSampling(0.0, 0, 1.0, 3, adjustments=SlotAdjustments(grammar=GRAMMARS[1])),
        SlotSampling(0.0, 0, 1.0, 7, adjustments=ADJUSTED["penalties"]),
        GREEDY,
    ]
    plain = PlanDriver(following_grammars(folder), 1)
    expected = plain.run(prompts, 16, samplings=samplings)
    executor = following_grammars(folder)
    info = read_model_info(folder)
    model = load_model(info, torch.float32, CPU, silent, longest=512)
    drafting_by(executor, DraftModelDrafter(model, executor.slots))
    got = PlanDriver(executor, 2).run(prompts, 16, samplings=samplings, preemptions=2)
    assert up_to_end(got) == up_to_end(expected)
    assert executor.drafting is not None
    assert sum(executor.drafting.counts.accepted["grammar"]) > 0
    assert sum(executor.drafting.counts.accepted["draft-model"]) > 20


def configured(target: Path, draft: Path, **settings: Any) -> Config:
    return Config(
        model=ModelConfig(model=str(target)),
        device=DeviceConfig(device="cpu"),
        speculation=SpeculationConfig(
            speculative="draft-model", speculative_model=str(draft), **settings
        ),
    )


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    """A target and a draft model with the same tokenizer."""
    made = write_model("llama", tmp_path / "target"), write_model("qwen3", tmp_path / "draft")
    for folder in made:
        make_tokenizer(307).save(str(folder / "tokenizer.json"))
    return made


def test_a_draft_model_is_loaded_from_its_folder_and_counted(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    config, info = configured(target, draft), read_model_info(target)
    executor = executor_for(target, kind=DraftingExecutor)
    drafter = make_drafter(config, info, executor._model, executor.slots)
    assert isinstance(drafter, DraftModelDrafter)
    shape = read_draft_shape(config, info, [], on_cpu=True)
    assert shape is not None
    memory = sum(cache.nbytes for cache in drafter._memory.caches)
    assert memory == shape.block_bytes(8, 4) * (executor.capacity.num_blocks + 2)
    weights = sum(linear.num_bytes for linear in drafter._model.linears())  # type: ignore[attr-defined]
    assert 0.8 < shape.part(4, "float32").num_bytes / (weights + 307 * 64 * 4) < 1.25


def test_a_draft_model_that_does_not_fit_is_refused_by_name(folders: tuple[Path, Path]) -> None:
    target, draft = folders
    info = read_model_info(target)
    executor = executor_for(target, kind=DraftingExecutor)
    model, slots = executor._model, executor.slots

    def edited(file: str, key: str, value: Any) -> None:
        content = json.loads((draft / file).read_text())
        content[key] = value
        (draft / file).write_text(json.dumps(content))

    edited("config.json", "max_position_embeddings", 100)
    with pytest.raises(ConfigError, match=r"100 positions.*512.*--max-model-len"):
        make_drafter(configured(target, draft), info, model, slots)
    edited("config.json", "max_position_embeddings", 1024)
    make_tokenizer(306).save(str(draft / "tokenizer.json"))
    with pytest.raises(BadModelFolder, match=r"tokenizer.json differs.*target's vocabulary"):
        make_drafter(configured(target, draft), info, model, slots)
    with pytest.raises(ConfigError, match=r"--speculative-model ORG/NAME: .*download it"):
        read_draft_shape(configured(target, Path("ORG/NAME")), info, [], on_cpu=True)
    with pytest.raises(ConfigError, match=r"draft-model: .*GPU.*--device cpu"):
        read_draft_shape(configured(target, draft), info, [], on_cpu=False)
