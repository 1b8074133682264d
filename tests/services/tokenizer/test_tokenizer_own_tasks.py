"""What a tokenizer answers without an engine: token ids of prompts, and their text."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest

from penstock.loadtest.models.make_model import make_model
from penstock.protocol.model_info import ModelInfo, read_model_info
from penstock.protocol.sampling import SamplingParams
from penstock.protocol.wire.messages.requests import (
    Chat,
    ChoiceState,
    Prompt,
    PromptText,
    RequestHead,
    Tokens,
    Work,
)
from penstock.protocol.wire.messages.tokens import Text, TokenIds
from penstock.services.tokenizer.own_tasks import answer
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel

LIMIT = 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("own-tasks") / "model")


@pytest.fixture(scope="module")
def model(folder: Path) -> TextModel:
    return TextModel.load(folder)


@pytest.fixture(scope="module")
def info(folder: Path) -> ModelInfo:
    return read_model_info(folder)


def work(task: str, prompt: Prompt, **params: bool) -> Work:
    return Work(RequestHead(task=task), prompt, SamplingParams(**params), [ChoiceState(0)])


HELLO = Chat(msgspec.json.encode([{"role": "user", "content": "hello"}]))


@pytest.mark.parametrize(
    "prompt", [HELLO, PromptText("hello world"), PromptText("hello", False), PromptText("")]
)
def test_the_ids_are_those_that_an_engine_would_get(
    prompt: Prompt, model: TextModel, info: ModelInfo
) -> None:
    ids = model.encode_prompt(prompt)
    assert answer(work("tokenize", prompt), model, info, LIMIT) == (ids, TokenIds(ids))


def test_text_without_special_tokens_is_encoded_alone(model: TextModel) -> None:
    alone = model.encode_prompt(PromptText("hello", False))
    assert alone == model.encode("hello", add_special_tokens=False)


def test_a_prompt_that_is_too_long_to_be_served_is_counted(
    model: TextModel, info: ModelInfo
) -> None:
    found = answer(work("tokenize", PromptText("hello " * LIMIT)), model, info, LIMIT)
    assert len(found.prompt) // 4 > LIMIT


def test_ids_become_their_text_with_or_without_special_tokens(
    model: TextModel, info: ModelInfo
) -> None:
    plain = model.encode("héllo 😀", add_special_tokens=False)
    end = np.array([info.eos_token_ids[0]], "<i4").tobytes()
    asked = Tokens(plain + end)
    found = answer(work("detokenize", asked), model, info, LIMIT)
    assert found == (asked.ids, Text("héllo 😀"))
    written = model.tokenizer.id_to_token(info.eos_token_ids[0])
    whole = answer(work("detokenize", asked, skip_special_tokens=False), model, info, LIMIT)
    assert whole.event == Text(f"héllo 😀{written}")


def test_an_id_outside_the_vocabulary_is_named(model: TextModel, info: ModelInfo) -> None:
    asked = Tokens(np.array([info.vocab_size], "<i4").tobytes())
    with pytest.raises(PromptError, match=f"token id {info.vocab_size} is outside"):
        answer(work("detokenize", asked), model, info, LIMIT)
