"""Messages of the system within a conversation reach every model, whatever its template takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from support.tokenizer.chat_templates import CHATML
from support.tokenizer.grammar_follower import tokenizer_of

from penstock.protocol.wire.messages.requests import Chat
from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.text_model import TextModel

_SAID = "{{ '<' ~ message.role ~ '>' ~ message.content }}"
ONCE = (
    "{% for message in messages %}{% if message.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    + _SAID
    + "{% endfor %}"
)
"""As Qwen 3.5's."""
ALTERNATING = (
    "{% set ns = namespace(n=0) %}{% for message in messages %}"
    "{% if message.role == 'user' or message.role == 'assistant' and not message.tool_calls %}"
    "{% if (message.role == 'user') != (ns.n % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user and assistant') }}{% endif %}"
    "{% set ns.n = ns.n + 1 %}"
    "{% elif message.role == 'system' and not loop.first %}{{ raise_exception('system') }}"
    "{% endif %}" + _SAID + "{% endfor %}"
)
"""As Mistral's."""
SILENT = (
    "{% for message in messages %}{% if message.role != 'system' or loop.first %}"
    + _SAID
    + "{% endif %}{% endfor %}"
)
"""As those that leave it out."""


def prompt(template: str, *messages: tuple[str, str], **first: Any) -> str:
    tokenizer, _, _ = tokenizer_of("json_tags", True)
    model = TextModel(tokenizer, ChatTemplate(template, {}, path=Path("template")))
    chat = [{"role": role, "content": text} for role, text in messages]
    for message in chat:
        if message["content"] == "call":
            function = {"name": "f", "arguments": "{}"}
            calls = [{"id": "c", "type": "function", "function": function}]
            message |= {"content": "", "tool_calls": calls}  # type: ignore[dict-item]
    ids = model.encode_prompt(Chat(msgspec.json.encode(chat)))
    return str(tokenizer.decode(memoryview(ids).cast("i").tolist(), skip_special_tokens=False))


LATE = ("user", "hi"), ("system", "Be brief.")


@pytest.mark.parametrize("template", [ONCE, ALTERNATING, SILENT])
def test_it_joins_what_the_user_says_where_a_template_does_not_take_it(template: str) -> None:
    assert prompt(template, *LATE) == "<user>hi\n\nBe brief."
    assert prompt(template, ("system", "a"), *LATE) == "<system>a<user>hi\n\nBe brief."
    assert prompt(template, ("system", "a"), ("system", "b"), ("user", "c")) == (
        "<system>a\n\nb<user>c"
    )
    assert prompt(template, *LATE, ("system", "x"), ("assistant", "y")) == (
        "<user>hi\n\nBe brief.\n\nx<assistant>y"
    )


@pytest.mark.parametrize("template", [ONCE, ALTERNATING, SILENT])
def test_behind_an_answer_it_begins_the_next_message_of_the_user(template: str) -> None:
    answered = ("user", "a"), ("assistant", "b")
    expected = "<user>a<assistant>b<user>c"
    assert prompt(template, *answered, ("system", "c")) == expected
    more = *answered, ("system", "c"), ("user", "d")
    assert prompt(template, *more, ("assistant", "e")) == expected + "\n\nd<assistant>e"
    assert prompt(template, *more, ("assistant", "e"), ("user", "f")).endswith("<user>f")


@pytest.mark.parametrize("template", [ONCE, ALTERNATING, SILENT])
def test_behind_the_result_of_a_tool_it_joins_the_result(template: str) -> None:
    called = ("user", "a"), ("assistant", "call"), ("tool", "5"), ("system", "c")
    assert prompt(template, *called).endswith("<tool_response>\n5\n\nc\n</tool_response>")


def test_a_template_that_takes_it_gets_it_as_it_stands() -> None:
    assert prompt(CHATML, *LATE).startswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>system\nBe brief.<|im_end|>\n"
    )
