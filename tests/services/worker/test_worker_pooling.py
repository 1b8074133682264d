"""Decoders that make vectors and scores: the same as transformers makes of the hidden states."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.worker.pooled_prompts import pooled
from support.worker.tiny_models import make_model, some_prompts
from test_worker_model_executor import executor_for
from tokenizers import Tokenizer, models
from transformers import AutoModelForSequenceClassification

from penstock.protocol.config.fields import ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.wire.messages.engine import EngineSizes
from penstock.services.worker.model_executor import ModelExecutor
from penstock.services.worker.model_loading import add_tasks, judge_of
from penstock.services.worker.model_weights import load_model
from penstock.services.worker.pooling import _pooled
from penstock.services.worker.pooling_tasks import Layer, LayersTask
from penstock.services.worker.prompt_sums import PromptSums
from penstock.services.worker.slots import PlannedChunk

Folder = Callable[[str], Path]
LENGTHS = [1, 3, 33, 70]
SIZES = EngineSizes(60, 8, 8, 256, 256, 307)


def states(variant: str, prompts: list[list[int]]) -> list[torch.Tensor]:
    """Hidden states [tokens, hidden] of each prompt, behind the last norm."""
    model = make_model(variant).model
    with torch.inference_mode():
        return [model(torch.tensor([prompt])).last_hidden_state[0] for prompt in prompts]


def embedding_executor(folder: Path, **settings: Any) -> ModelExecutor:
    executor: ModelExecutor = executor_for(folder)
    info = read_model_info(folder)
    pooling = read_pooling(info, ModelConfig(task="embed", **settings))
    model: Any = executor._model
    add_tasks(executor, pooling, info, model, None)
    return executor


REDUCED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "last": lambda found: found[-1],
    "cls": lambda found: found[0],
    "mean": lambda found: found.mean(0),
    "max": lambda found: found.amax(0),
}


@pytest.mark.parametrize("kind", list(REDUCED))
def test_a_vector_is_that_of_transformers_however_its_prompt_is_cut(
    kind: str, tiny_folder: Folder
) -> None:
    prompts = some_prompts(LENGTHS)
    wanted = [REDUCED[kind](found).numpy() for found in states("qwen3", prompts)]
    executor = embedding_executor(tiny_folder("qwen3"), pooling=kind)
    assert executor.capacity.task_prompts == ("chunks" if kind == "last" else "all")
    for settings in ({}, {"chunk": 7}, {"chunk": 16, "preempt_after": 2}):
        executor.reset()
        got = pooled(executor, prompts, **settings)
        for mine, theirs in zip(got, wanted, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_without_a_head_and_its_classifier_are_read(tmp_path: Path) -> None:
    causal = make_model("qwen3")
    causal.model.save_pretrained(tmp_path / "base")
    config = causal.config
    config.num_labels, config.pad_token_id = 3, 0
    torch.manual_seed(1)
    classifier = AutoModelForSequenceClassification.from_config(config).float().eval()
    classifier.model.load_state_dict(causal.model.state_dict())
    classifier.save_pretrained(tmp_path / "classifier")
    (prompt,) = some_prompts([21])
    with torch.inference_mode():
        wanted = classifier(torch.tensor([prompt])).logits[0].numpy()
        vector = causal.model(torch.tensor([prompt])).last_hidden_state[0, -1].numpy()
    for name, expected in (("base", vector), ("classifier", wanted)):
        info = read_model_info(tmp_path / name)
        pooling = read_pooling(info, ModelConfig())
        assert not pooling.generates
        model = load_model(
            info, torch.float32, torch.device("cpu"), lambda note: None, headless=True
        )
        executor = ModelExecutor(model, SIZES)
        add_tasks(executor, pooling, info, model, None)
        (got,) = pooled(executor, [prompt], pooling.tasks[0])
        np.testing.assert_allclose(got, expected, atol=1e-4, rtol=1e-4)


def test_a_judge_brings_the_logits_of_no_and_yes(tiny_folder: Folder, tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-Reranker-tiny"
    shutil.copytree(tiny_folder("qwen3"), folder)
    vocabulary = {"no": 17, "yes": 23, "[UNK]": 0}
    Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    info, config = read_model_info(folder), ModelConfig(task="score")
    pooling = read_pooling(info, config)
    assert pooling.is_judge and not pooling.generates
    model = load_model(info, torch.float32, torch.device("cpu"), lambda note: None)
    (folder / "modules.json").write_text('[{"path": "1", "type": "a.modules.LogitScore"}]')
    (folder / "1").mkdir()
    (folder / "1/config.json").write_text('{"true_token_id": 5, "false_token_id": 4}')
    named = read_pooling(info, ModelConfig())
    assert named.is_judge and named.judged_by == [4, 5]
    judged = judge_of(model, info, pooling)
    executor = ModelExecutor(model, SIZES)
    add_tasks(executor, pooling, info, model, judged)
    (prompt,) = some_prompts([21])
    with torch.inference_mode():
        wanted = make_model("qwen3")(torch.tensor([prompt])).logits[0, -1, [17, 23]].numpy()
    (got,) = pooled(executor, [prompt], "score")
    np.testing.assert_allclose(got, wanted, atol=1e-4, rtol=1e-4)


def test_a_row_that_is_no_number_fails_alone_behind_dense_layers() -> None:
    layers = [Layer(np.eye(3, dtype=np.float32), np.ones(3, np.float32), "gelu")]
    task = LayersTask("embed", layers)
    states = np.array([[1, 2, 3], [np.nan, 0, 0], [4, 5, 6]], np.float32)
    pooled_rows, failures = _pooled(task, [4, 5, 6], states)
    assert [one.row for one in pooled_rows] == [4, 6] and [one.row for one in failures] == [5]
    for one, state in zip(pooled_rows, states[::2], strict=True):
        wanted = torch.nn.functional.gelu(torch.from_numpy(state) + 1).numpy()
        np.testing.assert_allclose(np.frombuffer(one.values, "<f4"), wanted, rtol=1e-6)
        assert one.values == task.pool(state)  # whatever stands beside it


@pytest.mark.parametrize("over", ["cls", "max"])
def test_what_is_not_added_up_is_kept_as_the_model_gives_it(over: Any) -> None:
    sums = PromptSums(over)
    states = torch.randn(4, 6, dtype=torch.bfloat16)
    for start in (0, 2):
        chunk = PlannedChunk(0, start, np.zeros(2, np.int32), start == 2, np.zeros(0, np.int32))
        sums.add(chunk, states[start : start + 2])
    kept = sums._of[0].value
    assert (kept.dtype, kept.untyped_storage().nbytes()) == (torch.bfloat16, 12)
    wanted = states[0] if over == "cls" else states.amax(0)
    np.testing.assert_array_equal(sums.states([0])[0], wanted.float().numpy())
