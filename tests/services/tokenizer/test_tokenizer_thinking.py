"""Where an answer begins, for models that think and for others."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from support.tokenizer.chat_templates import CHATML, THINKING
from tokenizers import AddedToken, Tokenizer

from penstock.loadtest.models.make_model import make_tokenizer
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.output.family import THINK_TAGS
from penstock.services.tokenizer.text_model import TextModel
from penstock.services.tokenizer.thinking import Thinking
from penstock.services.tokenizer.thinking import thinking as thinking_behind

BEGIN, END = ((number).to_bytes(4, "little") for number in (512, 513))
HELLO = [{"role": "user", "content": "Hello"}]
LATER = [
    *HELLO,
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi."},
    {"role": "user", "content": "And </think> now?"},
]


def thinker(*, special: bool) -> Tokenizer:
    tokenizer = make_tokenizer(512)
    tokenizer.add_tokens([AddedToken(text, special=special) for text in THINK_TAGS[:2]])
    return tokenizer


def model(template: str | None, tokenizer: Tokenizer) -> TextModel:
    compiled = template and ChatTemplate(template, {}, path=Path("template"))
    return TextModel(tokenizer, compiled or None)


def thinking(text_model: TextModel, prompt: bytes) -> Thinking:
    """With the marks that are found out from the model."""
    return thinking_behind(text_model, prompt, text_model.form.family.reasoning)


def rendered(text_model: TextModel, messages: list[dict[str, str]], **variables: object) -> bytes:
    kwargs = msgspec.json.encode(variables)
    return text_model.encode_chat(msgspec.json.encode(messages), kwargs)


@pytest.mark.parametrize("special", [False, True])
@pytest.mark.parametrize("messages", [HELLO, LATER])
def test_a_model_that_thinks_may_open_its_thinking_before_it_answers(
    messages: list[dict[str, str]], special: bool
) -> None:
    one = model(THINKING, thinker(special=special))
    ids = rendered(one, messages)
    assert thinking(one, ids) == Thinking(END, BEGIN)


@pytest.mark.parametrize("messages", [HELLO, LATER])
def test_an_answer_without_thinking_begins_at_once(messages: list[dict[str, str]]) -> None:
    one = model(THINKING, thinker(special=False))
    assert thinking(one, rendered(one, messages, enable_thinking=False)) == Thinking()


def test_thinking_that_the_prompt_has_begun_is_waited_for() -> None:
    one = model(THINKING, thinker(special=False))
    ids = rendered(one, HELLO) + one.encode("<think>\n", add_special_tokens=False)
    assert thinking(one, ids) == Thinking(END)
    assert thinking(one, one.encode("x <think>\n", add_special_tokens=False)) == Thinking(END)


@pytest.mark.parametrize("behind", [0, 1, 4095, 4096, 9000])
def test_thinking_is_found_however_much_stands_behind_its_beginning(behind: int) -> None:
    one = model(THINKING, thinker(special=False))
    opened = one.encode("x <think>", add_special_tokens=False)
    text = one.encode("a", add_special_tokens=False) * behind
    assert thinking(one, opened + text) == Thinking(END)
    assert thinking(one, opened + text + END + text) == Thinking()


def test_a_prompt_that_is_no_chat_is_answered_at_once() -> None:
    one = model(THINKING, thinker(special=False))
    for text in ("Once upon a time", "<think>a</think>b", "<|endoftext|>Once", ""):
        assert thinking(one, one.encode(text, add_special_tokens=False)) == Thinking()


@pytest.mark.parametrize(
    ("template", "tokenizer"),
    [
        (CHATML, thinker(special=True)),
        (THINKING, make_tokenizer(512)),
        (None, thinker(special=True)),
    ],
    ids=["template without thinking", "no such token", "no template"],
)
def test_other_models_answer_at_once(template: str | None, tokenizer: Tokenizer) -> None:
    one = model(template, tokenizer)
    ids = one.encode("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n", False)
    assert thinking(one, ids) == Thinking()


def test_a_model_whose_template_never_closes_its_thinking_may_think() -> None:
    """A template that only opens it, and one that says nothing of it."""
    opens = CHATML + "{{ '<think>\n' }}"
    one = model(opens, thinker(special=True))
    assert thinking(one, rendered(one, HELLO)) == Thinking(END)
    compiled = ChatTemplate(CHATML, {}, path=Path("template"))
    named = TextModel(thinker(special=True), compiled, parsers=("auto", "qwen3"))
    assert thinking(named, rendered(named, HELLO)) == Thinking(END, BEGIN)
