"""The adapter of the built-in model: its skill, its files, and that it is what makes the skill."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import penstock.demo
from penstock.demo.chat import prompt_text
from penstock.demo.exchange import Random, is_held_out
from penstock.demo.grading import ADAPTER_SKILLS, ALL_SKILLS, is_right, questions
from penstock.demo.mixture import question
from penstock.demo.skills.number_words import in_words
from penstock.demo.training import adapter
from penstock.demo.training.generate import answers, load

DEMO = Path(penstock.demo.__file__).parent
FOLDER = DEMO / "adapters" / "number_words"
needs_model = pytest.mark.skipif(
    not (DEMO / "model/config.json").exists(), reason="demo/model is not there"
)


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (0, "zero"),
        (13, "thirteen"),
        (40, "forty"),
        (99, "ninety-nine"),
        (100, "one hundred"),
        (512, "five hundred twelve"),
        (1000, "one thousand"),
        (1205, "one thousand two hundred five"),
        (9970, "nine thousand nine hundred seventy"),
    ],
)
def test_demo_numbers_are_written_in_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_demo_an_adapters_skill_is_asked_where_it_is_named_and_held_out_as_others_are() -> None:
    assert set(ADAPTER_SKILLS).isdisjoint(ALL_SKILLS)
    for name in ADAPTER_SKILLS:
        for _, made in questions([name], 20, seed=3, free=True):
            assert is_held_out(made.exchanges[-1].key)
        for _ in range(20):
            assert not is_held_out(question(name, Random(name), "training").exchanges[-1].key)


@needs_model
def test_demo_the_adapter_is_small_and_answers_what_the_model_alone_does_not(
    tmp_path: Path,
) -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir()) < 1_000_000
    asked = [made for _, made in questions(ADAPTER_SKILLS, 8, seed=2)]
    prompts = [prompt_text(made) for made in asked]
    model, tokenizer = load(DEMO / "model", "cpu", torch.float32)
    alone = answers(model, tokenizer, prompts, 24)
    adapter.read(model, FOLDER)
    said = answers(model, tokenizer, prompts, 24)
    right = [is_right(text, made.exchanges[-1]) for text, made in zip(said, asked, strict=True)]
    assert sum(right) >= 7, said
    assert not any(
        is_right(one, made.exchanges[-1]) for one, made in zip(alone, asked, strict=True)
    )
    adapter.save(model, tmp_path, 8, 16.0)
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        assert (tmp_path / name).read_bytes() == (FOLDER / name).read_bytes()
