"""Conversations as text: the split, the template, the packing."""

from __future__ import annotations

import functools
from pathlib import Path

import jinja2
import numpy as np
import pytest
from tokenizers import Tokenizer

import penstock.demo
from penstock.demo.chat import CHAT_TEMPLATE, messages, prompt_text, render, tools_text
from penstock.demo.exchange import Random, is_held_out, plain
from penstock.demo.grading import ALL_SKILLS, questions
from penstock.demo.mixture import conversation
from penstock.demo.skills.toolbox import KNOWN
from penstock.demo.training.check_split import overlap
from penstock.demo.training.packing import IGNORED, Packed, encode

MODEL = Path(penstock.demo.__file__).parent / "model"
TOKENIZER = MODEL / "tokenizer.json"
needs_model = pytest.mark.skipif(not TOKENIZER.exists(), reason="demo/model is not there")


@functools.cache
def template() -> jinja2.Template:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True)
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False}
    return environment.from_string(CHAT_TEMPLATE)


def test_demo_held_out_questions_are_never_in_the_training_text() -> None:
    """Worded as known or freely: ``overlap`` asks both."""
    assert overlap(count=40, seed=1, training_seed=0, steps=range(4)) == []
    source = Random(3)
    for _ in range(500):
        assert not any(is_held_out(each.key) for each in conversation(source).exchanges)


def test_demo_every_question_of_an_evaluation_is_held_out_and_the_same_again() -> None:
    first = list(questions(ALL_SKILLS, 5, seed=7))
    assert [name for name, _ in first] == [name for name in ALL_SKILLS for _ in range(5)]
    assert all(is_held_out(made.exchanges[-1].key) for _, made in first)
    freely = list(questions(ALL_SKILLS, 5, seed=7, free=True))
    assert all(is_held_out(made.exchanges[-1].key) for _, made in freely)
    again = [messages(made) for _, made in questions(ALL_SKILLS, 5, seed=7)]
    assert again == [messages(made) for _, made in first]
    assert again != [messages(made) for _, made in questions(ALL_SKILLS, 5, seed=8)]


def test_demo_the_template_writes_what_the_training_reads() -> None:
    source = Random(5)
    for _ in range(200):
        made = conversation(source)
        written = template().render(
            messages=messages(made),
            add_generation_prompt=True,
            enable_thinking=made.enable_thinking,
        )
        assert written == prompt_text(made)


def test_demo_tools_given_to_the_template_read_like_tools_in_the_system_message() -> None:
    tools = [tool.offer() for tool in KNOWN[:2]]
    question = {"role": "user", "content": "Hi"}
    asked = template().render(messages=[question], tools=tools)
    system = {"role": "system", "content": tools_text(tools)}
    # Jinja escapes < and > in JSON for pages; tools hold neither.
    assert asked == template().render(messages=[system, question])
    system = {"role": "system", "content": f"Be brief.\n\n{tools_text(tools)}"}
    both = template().render(
        messages=[{"role": "system", "content": "Be brief."}, question], tools=tools
    )
    assert both == template().render(messages=[system, question])


def test_demo_the_template_writes_tool_calls_and_results_and_drops_earlier_thinking() -> None:
    call = {"function": {"name": "f", "arguments": {"a": 1}}}
    text = template().render(
        messages=[
            {"role": "user", "content": "x"},
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\ny"},
            {"role": "user", "content": "z"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "content": "7"},
        ],
        add_generation_prompt=True,
    )
    assert text == (
        "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\ny<|im_end|>\n"
        "<|im_start|>user\nz<|im_end|>\n<|im_start|>assistant\n<tool_call>\n"
        '{"name": "f", "arguments": {"a": 1}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@needs_model
def test_demo_encoded_pieces_decode_to_the_conversation() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    source = Random(9)
    for _ in range(100):
        made = conversation(source)
        ids, labels = encode(tokenizer, made)
        text = "".join(part for part, _ in render(made))
        assert tokenizer.decode(ids, skip_special_tokens=False) == plain(text)
        said = [label for label in labels if label != IGNORED]
        answer = tokenizer.decode(said, skip_special_tokens=False)
        assert answer.endswith(plain(made.exchanges[-1].answer) + "<|im_end|>")


@needs_model
def test_demo_a_digit_is_always_a_token_of_its_own() -> None:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    assert [token for token in tokenizer.encode("1234+56=7").tokens if token.isdigit()] == list(
        "1234567"
    )


@needs_model
def test_demo_a_batch_is_the_same_again_and_keeps_its_documents_apart() -> None:
    data = Packed(str(TOKENIZER), seed=1, rows=8, length=512, count=3)
    batch = data[1]
    assert np.array_equal(batch, Packed(str(TOKENIZER), 1, 8, 512, 3)[1])
    assert not np.array_equal(batch, data[2])
    ids, labels, documents = batch
    assert (documents > 0).mean() > 0.8
    for row in range(8):
        numbers = documents[row][documents[row] > 0]
        assert (np.diff(numbers) >= 0).all()
        inside = np.flatnonzero(
            (labels[row, :-1] != IGNORED) & (documents[row, 1:] == documents[row, :-1])
        )
        assert (labels[row, inside] == ids[row, inside + 1]).all()
