from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from support.growth import LINEAR, sixteenfold
from support.tokenizer.chat_templates import (
    ALTERNATING,
    CHATML,
    CONVERSATIONS,
    SYSTEM,
    TEMPLATES,
    THINKING,
)

from penstock.protocol.model_info import BadModelFolder
from penstock.services.tokenizer.chat_template import (
    ChatTemplate,
    read_chat_template,
    read_messages,
    read_variables,
)
from penstock.services.tokenizer.prompt_error import PromptError

TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}
HELLO = [{"role": "user", "content": "hello"}]


def compiled(source: str, max_seconds: float = 5.0) -> ChatTemplate:
    return ChatTemplate(source, TOKENS, path=Path("chat_template.jinja"), max_seconds=max_seconds)


def rendered(source: str, messages: list[dict[str, Any]], **variables: Any) -> str:
    return compiled(source).render(read_messages(json.dumps(messages).encode()), variables)


@pytest.mark.parametrize("name", sorted(TEMPLATES))
@pytest.mark.parametrize("number", range(len(CONVERSATIONS)))
@pytest.mark.parametrize("variables", [{}, {"enable_thinking": False}])
def test_text_equals_that_of_transformers(name: str, number: int, variables: dict) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    (expected,), _ = render_jinja_template(
        conversations=[CONVERSATIONS[number]],
        chat_template=TEMPLATES[name],
        add_generation_prompt=True,
        **TOKENS,
        **variables,
    )
    assert rendered(TEMPLATES[name], CONVERSATIONS[number], **variables) == expected


def test_the_template_refuses_messages_in_its_own_words() -> None:
    with pytest.raises(PromptError, match="roles must alternate") as caught:
        rendered(ALTERNATING, SYSTEM)
    assert caught.value.param == "messages"
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("{{ messages[0].nothing.more }}", "has no attribute 'nothing'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ messages[0].content.nothing() }}", "nothing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ strftime_now }}{{ [raise_exception][0](strftime_now) }}", "function"),
    ],
)
def test_failures_inside_a_template_are_one_clean_line(source: str, says: str) -> None:
    with pytest.raises(PromptError, match=says) as caught:
        rendered(source, HELLO)
    assert "Traceback" not in caught.value.message
    assert "0x" not in caught.value.message


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__.__subclasses__() }}",
    "{{ ('{0.__class__.__mro__}').format(1) }}",
    "{{ ''|attr('format')|attr('__globals__') }}",
    "{{ ('{0.__init__.__globals__}'|attr('format'))(raise_exception) }}",
    "{{ '{x.__class__}'.format_map({'x': 1}) }}",
    "{{ ['{0.__class__.__mro__}']|map('format', 1)|first }}",
    "{{ strftime_now.__globals__ }}",
    "{{ raise_exception['__globals__'] }}",
    "{{ self.__init__.__globals__ }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ (messages|map(attribute='__class__')|first).__mro__ }}",
    "{{ lipsum.__globals__ }}",
    "{% set _ = messages.append({'role': 'user'}) %}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os.getcwd() }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_a_template_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = rendered(source, HELLO)
    except PromptError as error:
        text = error.message
        assert "root:" not in text
        return
    # Jinja prints undefined attributes as nothing; format without a safe method prints itself.
    assert text.strip() in ("", "{0.__class__.__mro__}"), text


BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ ['a'] * 10**9 }}",
    "{{ 'a'|center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ 'a'.zfill(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{}}'.format(1, 10**9) }}",
    "{{ '%1000000000d'|format(1) }}",
    "{{ 10 ** (10 ** 8) }}",
    "{{ (2 ** 4000) * (2 ** 4000) }}",
    "{{ ('a' * 8000000).replace('a', 'a' * 1000) }}",
    "{{ ('a' * 8000000)|replace('a', 'a' * 1000) }}",
    "{{ (['a' * 8000000] * 1000)|join }}",
    "{{ ''.join(['a' * 8000000] * 1000) }}",
    "{{ ('a' * 1000000).join(['b'] * 100000) }}",
    "{{ ['a' * 8000000] * 1000 }}",
    "{{ 1 ~ (['a' * 8000000] * 1000) }}",
    "{{ (['a' * 8000000] * 1000)|tojson }}",
    "{{ {'a': 1}|tojson(indent=10**9) }}",
    "{{ 'a'|indent(10**9, true) }}",
    "{% for i in range(100000) %}{{ 'a' * 1000 }}{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}"
    "{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}"
    "{% set ns.x = [ns.x, ns.x]|sum(start=[]) %}{% endfor %}",
    "{% set x %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endset %}{{ x|length }}",
    "{% set x %}{{ 'a' * 8000000 }}{{ 'a' * 8000000 }}{% endset %}{{ x|length }}",
    "{% macro f() %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endmacro %}"
    "{{ f()|length }}",
    "{% macro f() %}{{ caller()|length }}{% endmacro %}"
    "{% call f() %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endcall %}",
    "{% filter length %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endfilter %}",
    "{% block x %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endblock %}",
    "{% if 0 %}{% block x %}{% for i in range(48) %}{{ 'a' * 1000000 }}{% endfor %}{% endblock %}"
    "{% endif %}{{ self.x()|length }}",
    "{% set x %}{% for i in range(48) %}{{ ['a' * 1000000] }}{% endfor %}{% endset %}",
    "{% macro f(n) %}{% set x = 'a' * 8000000 %}{{ f(n + 1) }}{{ x|length }}{% endmacro %}"
    "{{ f(0) }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(999) %}"
    "{% set ns.x = [ns.x, 'a' * 8000000] %}{% endfor %}",
    "{% set ns = namespace(x=[], y='a' * 8000000) %}{% for i in range(999) %}"
    "{% set ns.x = [ns.x, ns.y[1:]] %}{% endfor %}",
    "{% set ns = namespace(x=[], y='a ' * 4000000) %}{% for i in range(999) %}"
    "{% set ns.x = [ns.x, ns.y.split()] %}{% endfor %}",
    "{% set ns = namespace(x={}) %}{% for i in range(999) %}"
    "{% set ns.x = dict(ns.x, **{i|string: 'a' * 8000000}) %}{% endfor %}",
    "{{ [10 ** 1000] * 1000000 }}",
    "{{ ([10 ** 1000] * 1000000)|tojson }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = namespace(l=ns.x, r=ns.x) %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x='a') %}{% for i in range(99) %}"
    "{% set ns.x = {'l': ns.x, 'r': ns.x}.values() %}{% endfor %}{{ ns.x }}",
    "{{ [('a' * 8000000).lower] * 1000 }}",
    "{{ ('a' * 8000000)|replace(old='a', new='a' * 1000) }}",
    "{{ ('a' * 8000000)|replace(new='a' * 1000, old='a') }}",
    "{{ (['a' * 100] * 70000)|replace('a', 'a' * 1000) }}",
    "{{ ('a' * 8000000).encode().replace('a'.encode(), ('a' * 1000).encode()) }}",
    "{{ ('a' * 1000000).encode().join(['b'.encode()] * 100000) }}",
    "{{ '%1000000000d'.encode() % 1 }}",
    "{{ (['b'] * 100000)|join(attribute=0, d='a' * 1000000) }}",
    "{{ '{:{}}'.format('a', '>9999999999') }}",
    "{{ '{:{}}'.encode().decode().format('a', '>9999999999') }}",
    "{{ '{a:{b}}'.format_map({'a': 'a', 'b': '>9999999999'}) }}",
    "{{ ('{:{}}'|safe).format('a', '^9999999999') }}",
    "{{ 1.5|round(100000000, 'ceil') }}",
    "{% set ns = namespace(x=[1] * 300000) %}{% for i in range(200) %}{% set ns.x = [ns.x] %}"
    "{% endfor %}{{ ns.x|tojson(indent=8) }}",
    "{{ {'a' * 1000000: [1] * 100000}|pprint }}",
    "{{ range(10**9)|list }}",
    "{% for i in range(10**9) %}{% endfor %}",
    "{{ lipsum(10**6) }}",
    "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_a_template_cannot_ask_for_endless_memory(source: str) -> None:
    """It is refused for what it asks for, and not for its time."""
    template = compiled(source, max_seconds=60.0)
    begin = time.process_time()
    with pytest.raises(PromptError) as refused:
        template.render(HELLO, {})
    assert "it takes longer than" not in str(refused.value)
    assert time.process_time() - begin < 20.0  # a second on a free machine


LOOP = "{% for i in range(100000) %}"


@pytest.mark.parametrize(
    "source",
    [
        LOOP * 10 + "{% endfor %}" * 10,
        "{% set r = range(100000)|list %}" + "{% for i in r %}" * 5 + "{% endfor %}" * 5,
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}"
        "{{ f(60) }}",
    ],
)
def test_a_template_that_never_ends_is_stopped(source: str) -> None:
    template = compiled(source, max_seconds=0.2)
    begin = time.monotonic()
    with pytest.raises(PromptError, match=r"longer than 0\.2 s"):
        template.render(HELLO, {})
    assert time.monotonic() - begin < 20.0  # each would take minutes and more


def test_a_long_conversation_renders_in_linear_time() -> None:
    def seconds(count: int) -> float:
        messages = [{"role": "user", "content": "hello there"}] * count
        template = compiled(THINKING)
        begin = time.process_time()
        template.render(messages, {})
        return time.process_time() - begin

    assert sixteenfold(seconds, 300) < LINEAR


def test_content_may_be_text_parts() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "input_text", "text": "two"}]
    (message,) = read_messages(json.dumps([{"role": "user", "content": parts}]).encode())
    assert message["content"] == "one\ntwo"


def test_null_fields_count_as_absent() -> None:
    (message,) = read_messages(b'[{"role": "assistant", "content": null, "name": null}]')
    assert message == {"role": "assistant"}


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "at least one message"),
        ({}, "must be a list"),
        (["x"], r"messages\[0\] must be an object"),
        ([{"content": 1}], r"messages\[0\].content must be text or a list of parts"),
        ([{"content": [{"type": "image_url"}]}], r"content\[0\].type is 'image_url'"),
        ([{"content": ["a", 1]}], r"content\[1\].type is None"),
        ([{"content": [{"type": "text"}]}], r"content\[0\].text must be a string"),
    ],
)
def test_messages_of_the_wrong_shape_are_named(messages: Any, says: str) -> None:
    with pytest.raises(PromptError, match=says):
        read_messages(json.dumps(messages).encode())


@pytest.mark.parametrize("name", ["messages", "tools", "tokenize", "chat_template", "eos_token"])
def test_template_variables_of_our_own_cannot_be_overridden(name: str) -> None:
    with pytest.raises(PromptError, match=f"may not set {name}"):
        read_variables(json.dumps({name: "x"}).encode())


@pytest.mark.parametrize("encoded", [b"", b"[", b"[1", b'"\xff"', b"[" * 100_000])
def test_broken_json_is_a_prompt_error(encoded: bytes) -> None:
    with pytest.raises(PromptError):
        read_messages(encoded)
    with pytest.raises(PromptError):
        read_variables(encoded)


def test_the_generation_prompt_can_be_left_out() -> None:
    assert rendered(CHATML, HELLO).endswith("<|im_start|>assistant\n")
    assert rendered(CHATML, HELLO, add_generation_prompt=False).endswith("hello<|im_end|>\n")


def test_the_jinja_file_goes_before_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": "from config"}
    found = read_chat_template(tmp_path, config, {})
    assert found is not None
    assert found.render(HELLO, {}) == "from config"
    (tmp_path / "chat_template.jinja").write_text("from file")
    found = read_chat_template(tmp_path, config, {})
    assert found is not None
    assert found.render(HELLO, {}) == "from file"
    assert read_chat_template(tmp_path / "none", {}, {}) is None


def test_of_named_templates_the_default_is_taken(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    found = read_chat_template(tmp_path, {"chat_template": named}, {})
    assert found is not None
    assert found.render(HELLO, {}) == "D"
    with pytest.raises(BadModelFolder, match="no template named default"):
        read_chat_template(tmp_path, {"chat_template": named[:1]}, {})


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{ x", "{% nonsense %}", "{{ 'a'|nonsense }}", "{{ " + "(" * 5000]
)
def test_a_template_that_does_not_compile_is_a_bad_folder(source: str, tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_text("\n" + source)
    with pytest.raises(BadModelFolder, match=r"chat_template\.jinja"):
        read_chat_template(tmp_path, {}, {})
