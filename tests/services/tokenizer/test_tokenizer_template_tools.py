"""Every kind of chat template gets tools, calls and results in the form that it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.services.tokenizer.chat_template import ChatTemplate
from penstock.services.tokenizer.template_tools import ToolStyle, find_style, shaped

_TURNS = "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
_RESULT = "{% if m.role == 'tool' %}[{{ m.tool_call_id }}]{% endif %}"
_END = "{% endfor %}"
_TOOLS = "{% if tools %}{% for t in tools %}{{ t.function | tojson }}{% endfor %}{% endif %}"


def _calls(call: str) -> str:
    return "{% for c in m.tool_calls or [] %}" + call + "{% endfor %}"


TEMPLATES = {
    "none": _TURNS + _END,
    "tojson": _TOOLS
    + _TURNS
    + _calls("{{ c.function.name }}{{ c.function.arguments | tojson }}")
    + _RESULT
    + _END,
    "mapping or text": _TOOLS
    + _TURNS
    + _calls(
        "{{ c.function.name }}{{ c.function.arguments if c.function.arguments is string "
        "else c.function.arguments | tojson }}"
    )
    + _RESULT
    + _END,
    "concatenated": _TOOLS
    + _TURNS
    + _calls("{{ c.function.name + '\n' + c.function.arguments }}")
    + _RESULT
    + _END,
    "printed": _TOOLS
    + _TURNS
    + _calls("{{ c.function.name }} {{ c.function.arguments }}")
    + _RESULT
    + _END,
    "items": _TOOLS
    + _TURNS
    + _calls("{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }};{% endfor %}")
    + _RESULT
    + _END,
    "nine letters": _TOOLS
    + _TURNS
    + _calls(
        "{% if c.id | length != 9 %}{{ raise_exception('9!') }}{% endif %}"
        "{{ c.id }}{{ c.function.arguments | tojson }}"
    )
    + _RESULT
    + _END,
}
GPT_OSS = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- set last = namespace(name=none) %}
{%- for m in messages %}
    {%- if m.role == 'assistant' and 'tool_calls' in m %}
        {%- set later = messages[loop.index:] | selectattr('role', 'equalto', 'assistant') | list %}
        {%- set ended = later | rejectattr('tool_calls', 'defined') | list %}
        {%- if m.content and m.thinking %}{{ raise_exception('one or the other') }}{% endif %}
        {%- if not ended and (m.thinking or m.content) %}
            {{- '<analysis>' ~ (m.thinking or m.content) }}
        {%- endif %}
        {%- set call = m.tool_calls[0].function %}
        {%- set last.name = call.name %}
        {{- '<to=' ~ call.name ~ '>' ~ (call.arguments | tojson) }}
    {%- elif m.role == 'tool' %}{{ '<' ~ last.name ~ '>' ~ m.content }}
    {%- else %}{{ '<' ~ m.role ~ '>' ~ m.content }}
    {%- endif %}
{%- endfor %}"""
"""The rules by which gpt-oss's own template takes messages."""
ONE_CALL = (
    _TOOLS
    + "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls | length > 1 %}"
    + "{{ raise_exception('single calls only') }}{% endif %}<{{ m.role }}>{{ m.content }}"
    + _calls("{{ c.function.name }}{{ c.function.arguments | tojson }}")
    + _END
)
TEMPLATES |= {"one call": ONE_CALL, "gpt-oss": GPT_OSS}
CALL_ID = "call_0011223344556677889900aa"
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def template(name: str) -> ChatTemplate:
    return ChatTemplate(TEMPLATES[name], {}, path=Path("chat_template.jinja"))


def style_of(name: str) -> ToolStyle:
    made = template(name)
    return find_style(lambda messages, tools: made.render(messages, {"tools": tools}))


def conversation(arguments: str = '{"a": "ü\\n"}') -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        {"role": "user", "content": "x"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": CALL_ID, "type": "function", "function": function}],
        },
        {"role": "tool", "content": "5", "tool_call_id": CALL_ID, "name": "f"},
    ]


def rendered(name: str, messages: list[dict[str, Any]]) -> str:
    messages, tools = shaped(messages, TOOLS, style_of(name))
    return template(name).render(messages, {"tools": tools})


@pytest.mark.parametrize(
    ("name", "style"),
    [
        ("none", ToolStyle()),
        ("tojson", ToolStyle(True, True)),
        ("mapping or text", ToolStyle(True, True)),
        ("concatenated", ToolStyle(True, False)),
        ("printed", ToolStyle(True, False)),
        ("items", ToolStyle(True, True)),
        ("nine letters", ToolStyle(True, True, True)),
        ("one call", ToolStyle(True, one_call=True)),
        ("gpt-oss", ToolStyle(True, one_call=True, one_text=True)),
    ],
)
def test_a_template_is_found_out_by_trying_it(name: str, style: ToolStyle) -> None:
    assert style_of(name) == style


@pytest.mark.parametrize("name", ["tojson", "mapping or text", "concatenated", "printed"])
def test_the_arguments_of_an_earlier_call_stand_in_the_prompt_as_json_once(name: str) -> None:
    text = rendered(name, conversation())
    begin = text.index("{", text.index("<assistant>"))
    assert json.JSONDecoder().raw_decode(text, begin)[0] == {"a": "ü\n"}


def test_ids_become_short_where_the_template_takes_no_others_and_stay_matched() -> None:
    text = rendered("nine letters", conversation())
    short = text.split("[")[1].split("]")[0]
    assert len(short) == 9
    assert text.count(short) == 2
    assert CALL_ID in rendered("tojson", conversation())


@pytest.mark.parametrize("arguments", ["", "no JSON", "[1]", "[" * 5000])
def test_arguments_that_are_no_object_do_not_fail(arguments: str) -> None:
    for name in TEMPLATES:
        if name != "items":
            assert "<user>x" in rendered(name, conversation(arguments))


def test_a_template_without_tools_gets_them_calls_and_results_as_text() -> None:
    text = rendered("none", conversation())
    system, _, rest = text.partition("<user>x")
    assert system.startswith("<system>")
    assert json.dumps(TOOLS[0]) in system
    begin, end = rest.index("<tool_call>\n"), rest.index("\n</tool_call>")
    call = json.loads(rest[begin + len("<tool_call>\n") : end])
    assert call == {"name": "f", "arguments": {"a": "ü\n"}}
    assert "<user><tool_response>\n5\n</tool_response>" in rest
    kept = [{"role": "system", "content": "Be brief."}, *conversation()]
    assert rendered("none", kept).startswith("<system>Be brief.\n\nYou may call")


def said(name: str, city: str) -> list[dict[str, Any]]:
    """Two calls at once behind thinking and words, with their results in the other order."""
    places = {"call_1": city, "call_2": "Bern"}
    calls = [
        {"id": key, "function": {"name": f"{name}{key[-1]}", "arguments": json.dumps({"a": one})}}
        for key, one in places.items()
    ]
    before = {"thinking": "Hm.", "reasoning_content": "Hm.", "content": "Let me see."}
    results = [
        {"role": "tool", "content": f"{one}!", "tool_call_id": key} for key, one in places.items()
    ]
    return [
        {"role": "user", "content": "x"},
        {"role": "assistant", **before, "tool_calls": calls},
        *reversed(results),
    ]


def test_words_are_the_end_of_the_thinking_where_a_template_takes_no_call_behind_both() -> None:
    text = rendered("gpt-oss", said("f", "Oslo"))
    _, _, turn = text.partition("<user>x")
    assert turn == (
        '<analysis>Hm.\n\nLet me see.<to=f1>{"a": "Oslo"}<f1>Oslo!<to=f2>{"a": "Bern"}<f2>Bern!'
    )


def test_the_thinking_of_an_earlier_turn_is_left_out_where_the_template_does_so() -> None:
    earlier = [*said("f", "Oslo"), {"role": "assistant", "content": "Cold."}]
    _, _, turn = rendered("gpt-oss", [*earlier, *said("g", "Rome")]).partition("<user>x")
    first, _, second = turn.partition("<assistant>Cold.<user>x")
    assert "Hm." not in first
    assert "<f2>Bern!" in first
    assert second.startswith("<analysis>Hm.\n\nLet me see.<to=g1>")


def test_several_calls_come_one_after_the_other_where_the_template_takes_one_a_message() -> None:
    text = rendered("one call", said("f", "Oslo"))
    places = [text.index(one) for one in ("f1{", "Oslo!", "f2{", "Bern!")]
    assert places == sorted(places)
    at_once = rendered("tojson", said("f", "Oslo"))
    assert at_once.index("f2{") < at_once.index("Oslo!")


def test_a_result_of_no_call_stays_behind_the_last_one() -> None:
    messages = said("f", "Oslo")
    messages[-1]["tool_call_id"] = "call_9"
    text = rendered("gpt-oss", messages)
    assert text.index("<f2>Bern!") < text.index("Oslo!")
