"""Greedy answers under penalties and bans, token by token those of transformers' processors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, GenerationConfig

import penstock
from penstock.loadtest.models.make_model import make_model

LENGTH = 40
PROMPTS = [[*range(20, 60)], [7, 7, 8, 7, 7, 8, 9], [300]]
END = 2
WORDS = ["Y", "\x16", "the mill"]

CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "repetition_penalty 1.3": ({"repetition_penalty": 1.3}, {"repetition_penalty": 1.3}),
    "repetition_penalty 1.9": ({"repetition_penalty": 1.9}, {"repetition_penalty": 1.9}),
    "repetition_penalty 0.7": ({"repetition_penalty": 0.7}, {"repetition_penalty": 0.7}),
    "logit_bias": (
        {"logit_bias": {40: 3.0, 59: -50.0, END: 0.5}},
        {"sequence_bias": [[[40], 3.0], [[59], -50.0], [[END], 0.5]]},
    ),
    "min_tokens": (
        {"min_tokens": 25, "logit_bias": {END: 50.0}},
        {"min_new_tokens": 25, "sequence_bias": [[[END], 50.0]]},
    ),
    "bad_words": ({"bad_words": WORDS}, {"bad_words_ids": "words"}),
    "all of them": (
        {"repetition_penalty": 1.4, "min_tokens": 9, "bad_words": WORDS, "logit_bias": {40: 2.0}},
        {
            "repetition_penalty": 1.4,
            "min_new_tokens": 9,
            "bad_words_ids": "words",
            "sequence_bias": [[[40], 2.0]],
        },
    ),
}
"""Ours, and what says the same to ``generate``. It applies biases after penalties, Penstock before
them: a bias under a penalty is only compared where no biased token was penalised yet."""


pytestmark = pytest.mark.slow


@pytest.fixture(scope="module", params=["made", "built in"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "built in":
        return Path(__file__).parent.parent.parent / "demo" / "model"
    return make_model(tmp_path_factory.mktemp("processors") / "m", hidden_size=32)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[penstock.LLM]:
    with penstock.LLM(str(folder), dtype="float32", threads=1) as running:
        yield running


def banned_rows(folder: Path) -> list[list[int]]:
    """Each word as it stands at the beginning of a text, and after a space."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    forms = [form for word in WORDS for form in (word, f" {word}")]
    return [tokenizer.encode(form, add_special_tokens=False).ids for form in forms]


def by_transformers(folder: Path, prompt: list[int], settings: dict[str, Any]) -> list[int]:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    if settings.get("bad_words_ids") == "words":
        settings = settings | {"bad_words_ids": banned_rows(folder)}
    config = GenerationConfig(
        do_sample=False, max_new_tokens=LENGTH, eos_token_id=END, pad_token_id=0, **settings
    )
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        found = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
    output: list[int] = found[0, len(prompt) :].tolist()
    return output


@pytest.mark.parametrize("case", CASES)
def test_greedy_answers_are_those_of_transformers_processors(
    case: str, llm: penstock.LLM, folder: Path
) -> None:
    ours, theirs = CASES[case]
    params = penstock.SamplingParams(temperature=0.0, max_tokens=LENGTH, **ours)
    results = llm.generate(PROMPTS, params)
    for prompt, result in zip(PROMPTS, results, strict=True):
        assert result.outputs[0].token_ids == by_transformers(folder, prompt, theirs)


def test_the_cases_change_what_comes(llm: penstock.LLM, folder: Path) -> None:
    plain = penstock.SamplingParams(temperature=0.0, max_tokens=LENGTH)
    prompts: list[Any] = list(PROMPTS)
    usual = [one.outputs[0].token_ids for one in llm.generate(prompts, plain)]
    changed = set()
    for case, (ours, _) in CASES.items():
        params = penstock.SamplingParams(temperature=0.0, max_tokens=LENGTH, **ours)
        found = [one.outputs[0].token_ids for one in llm.generate(prompts, params)]
        if found != usual:
            changed.add(case)
    made = folder.name == "m"
    assert changed == set(CASES) if made else len(changed) >= 3, changed
