"""Folders in the form in which Qwen3-Embedding, Qwen3-Reranker and EmbeddingGemma were published,
from texts to vectors and scores: by transformers as their model cards say, and by us."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from safetensors.torch import load_file
from support.pipeline.published_folders import (
    GEMMA_PROMPTS,
    QWEN3_PROMPTS,
    write_embedding_gemma,
    write_qwen3_embedding,
    write_qwen3_reranker,
)
from support.worker.pooled_prompts import pooled
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

from penstock.protocol.config import Config
from penstock.protocol.config.fields import CacheConfig, DeviceConfig, ModelConfig
from penstock.protocol.model_info import read_model_info
from penstock.protocol.pooling import read_pooling
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    ChoiceState,
    Pair,
    PoolingParams,
    Prompt,
    PromptText,
    RequestHead,
    Work,
)
from penstock.services.tokenizer.folder_tasks import FolderTasks
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.worker.encoders.loading import load_encoder_executor
from penstock.services.worker.executor import Executor
from penstock.services.worker.model_loading import load_model_executor

TEXTS = ["a weir", "What is a sluice, a penstock and a turbine? " * 3, "Überlauf: 水門"]
END = "<|endoftext|>"
"""What Qwen3-Embedding's tokenizer appends; its ``eos_token`` is another one."""
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
BEFORE = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and "
    'the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
AFTER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


class Ours:
    """What tokenizer and worker make of a folder, one after the other."""

    def __init__(self, folder: Path, **flags: Any) -> None:
        model = ModelConfig(model=str(folder), dtype="float32", **flags)
        config = Config(
            model=model,
            cache=CacheConfig(num_kv_blocks=128),
            device=DeviceConfig(device="cpu", threads=1),
        )
        info = read_model_info(folder)
        self._longest = info.max_model_len
        self.pooling = read_pooling(info, model)
        self._tasks = FolderTasks(self.pooling, info)
        self._text_model = TextModel.load(folder, info.vocab_size)
        load = load_encoder_executor if self.pooling.encoder else _decoder
        self._executor: Executor = load(config, info, lambda note: None)

    def answers(self, prompts: Sequence[Prompt], **asked: Any) -> list[npt.NDArray[np.float32]]:
        (task,) = self.pooling.tasks
        params = PoolingParams(**asked)
        encoded = [self._encoded(Work(
            RequestHead(task=task), prompt, SamplingParams(), [ChoiceState(0)], pooling=params,
        )) for prompt in prompts]  # fmt: skip
        found = pooled(self._executor, encoded, task)
        event = self._tasks.task(task, params).event
        return [np.frombuffer(event(one.tobytes()).values, "<f4") for one in found]

    def _encoded(self, work: Work) -> list[int]:
        assert isinstance(work.prompt, Prompt)
        ids = self._tasks.encode(work.prompt, work, self._text_model, self._longest).ids
        return [int(number) for number in np.frombuffer(ids, "<i4")]


def _decoder(config: Config, _: object, progress: Any) -> Any:
    return load_model_executor(config, progress)


def transformers_vectors(
    folder: Path, texts: list[str], prompt: str, mean: bool, dimensions: int | None
) -> torch.Tensor:
    """As the pooling, the dense modules and the normalization of sentence-transformers do it."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModel.from_pretrained(folder).float().eval()
    found = []
    with torch.inference_mode():
        for text in texts:
            ids = tokenizer(prompt + text, return_tensors="pt").input_ids
            assert ids[0, -1] == tokenizer.convert_tokens_to_ids("<eos>" if mean else END)
            states = model(ids).last_hidden_state[0]
            vector = states.mean(0) if mean else states[-1]
            for dense in sorted(folder.glob("*_Dense")):
                vector = load_file(dense / "model.safetensors")["linear.weight"] @ vector
            found.append(torch.nn.functional.normalize(vector, dim=0)[:dimensions])
    return torch.nn.functional.normalize(torch.stack(found), dim=1)


def compare(ours: Ours, folder: Path, prompts: dict[str, str], dimensions: int) -> None:
    mean = ours.pooling.kind == "mean"
    for name in ("query", "document"):
        for length in (None, dimensions):
            wanted = transformers_vectors(folder, TEXTS, prompts[name], mean, length)
            asked = {"input_type": name, "dimensions": length}
            got = ours.answers([PromptText(text) for text in TEXTS], **asked)
            np.testing.assert_allclose(np.stack(got), wanted.numpy(), atol=1e-4)


@pytest.mark.parametrize("tied", [True, False], ids=["0.6B", "8B"])
def test_qwen3_embedding_makes_the_vectors_of_its_model_card(tied: bool, tmp_path: Path) -> None:
    folder = write_qwen3_embedding(tmp_path / "Qwen3-Embedding-tiny", tied=tied)
    ours = Ours(folder)
    assert (ours.pooling.kind, ours.pooling.tasks) == ("last", ["embed"])
    compare(ours, folder, QWEN3_PROMPTS, 33)


def test_embedding_gemma_makes_the_vectors_of_its_model_card(tmp_path: Path) -> None:
    folder = write_embedding_gemma(tmp_path / "embeddinggemma-tiny")
    ours = Ours(folder, allow_dimensions=True)  # the shortest of its own is longer than these
    assert (ours.pooling.kind, len(ours.pooling.dense)) == ("mean", 2)
    compare(ours, folder, GEMMA_PROMPTS, 16)


def test_qwen3_reranker_makes_the_scores_of_its_model_card(tmp_path: Path) -> None:
    folder = write_qwen3_reranker(tmp_path / "Qwen3-Reranker-tiny")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).float().eval()
    no, yes = tokenizer.convert_tokens_to_ids(["no", "yes"])
    ours = Ours(folder, task="score")
    pairs = [Pair("What is a weir?", text) for text in TEXTS]
    before, after = (tokenizer.encode(part, add_special_tokens=False) for part in (BEFORE, AFTER))
    logits = []
    for pair in pairs:
        middle = f"<Instruct>: {INSTRUCTION}\n<Query>: {pair.text}\n<Document>: {pair.other}"
        ids = [*before, *tokenizer.encode(middle, add_special_tokens=False), *after]
        with torch.inference_mode():
            logits.append(model(torch.tensor([ids])).logits[0, -1, [no, yes]])
    for raw, both in zip(ours.answers(pairs, activation=False), logits, strict=True):
        np.testing.assert_allclose(raw, [both[1] - both[0]], atol=1e-4)
    for score, both in zip(ours.answers(pairs), logits, strict=True):
        np.testing.assert_allclose(score, [both.softmax(0)[1]], atol=1e-4)
