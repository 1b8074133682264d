"""Prompts that end with the last message, open."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.tokenizer.chat_templates import TEMPLATES
from support.tokenizer.tokenizer_zoo import byte_level

from penstock.services.launcher.builtin_model import builtin_model
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.prompt_error import PromptError
from penstock.services.tokenizer.text_model import TextModel

TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
OPEN = json.dumps({"continue_final_message": True, "add_generation_prompt": False}).encode()
CONTENTS = ["Sure", "Sure, ", " lead and trail \n\n", "", " ", "<think>\nhm", "a\n\n<b", "é😀 "]


def model(template: str) -> TextModel:
    chat = ChatTemplate(template, TOKENS, path=Path("chat_template.jinja"))
    return TextModel(byte_level(), chat)


def asked(content: Any, question: str = "Hi") -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": content}]


def encoded(messages: list[dict[str, Any]]) -> bytes:
    return json.dumps(messages).encode()


@pytest.mark.parametrize("name", ["chatml", "llama_3", "alternating", "thinking"])
@pytest.mark.parametrize("content", CONTENTS)
def test_the_prompt_equals_that_of_transformers(name: str, content: str) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[asked(content)],
        chat_template=TEMPLATES[name],
        continue_final_message=True,
        add_generation_prompt=False,
        **TOKENS,
    )
    given = model(TEMPLATES[name]).render_chat(encoded(asked(content)), OPEN)
    assert given == expected
    assert given.rstrip().endswith(content.strip())


def test_the_built_in_models_prompt_ends_with_the_message(tmp_path: Path) -> None:
    demo = TextModel.load(builtin_model())
    prompt = demo.render_chat(encoded(asked("The answer is ")), OPEN)
    assert prompt.endswith("<|im_start|>assistant\nThe answer is ")
    whole = demo.render_chat(encoded(asked("The answer is ")), b'{"add_generation_prompt": false}')
    assert whole == prompt + "<|im_end|>\n"


def test_control_tokens_in_a_message_that_is_continued_are_text() -> None:
    chatml = model(TEMPLATES["chatml"])
    messages = asked("a<|im_end|>b", "c<|im_start|>d")
    assert chatml.render_chat(encoded(messages), OPEN).endswith("assistant\na<|im_end|>b")
    ids = memoryview(chatml.encode_chat(encoded(messages), OPEN)).cast("i").tolist()
    control = [chatml.tokenizer.id_to_token(n) for n in ids if n in chatml.special_ids]
    assert control == ["<|im_start|>", "<|im_end|>", "<|im_start|>"]


def test_a_template_that_leaves_out_or_changes_the_message_is_an_error() -> None:
    for template, said in (
        ("{% for m in messages[:-1] %}{{ m.content }}{% endfor %}", "leaves out"),
        ("{% for m in messages %}{{ m.content | upper }}{% endfor %}", "leaves out|changes"),
        (TEMPLATES["chatml"].replace("message['content']", "message['content'][4:]"), "changes"),
    ):
        with pytest.raises(PromptError, match=f"continue_final_message: .*{said}"):
            model(template).render_chat(encoded(asked("Well, it is")), OPEN)
    demo = TextModel.load(builtin_model())
    with pytest.raises(PromptError, match="changes the text"):
        demo.render_chat(encoded(asked("<think>\nhm\n</think>\n\nIt is")), OPEN)


def test_a_message_without_content_is_continued_from_its_beginning() -> None:
    silent = [{"role": "user", "content": "Hi"}, {"role": "assistant"}]
    prompt = model(TEMPLATES["chatml"]).render_chat(encoded(silent), OPEN)
    assert prompt.endswith("<|im_start|>assistant\n")
