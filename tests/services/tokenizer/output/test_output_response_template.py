"""A checkpoint's response_template is read as transformers reads it."""

from __future__ import annotations

from typing import Any

import pytest
from support.tokenizer.output.replay import TOOLS, atoms, every_cut, joined, run, vocabularies
from test_output_odd_calls import calls_of
from transformers.utils.chat_parsing import parse_response

from penstock.services.tokenizer.output.response_template import (
    BadResponseTemplate,
    read_response_template,
)

THINKING = {"open": "<think>", "close": "</think>", "content": "text"}
CONTENT = {"close": "<|im_end|>", "content": "text"}
FUNCTION = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}


def template(calls: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "version": 1,
        "defaults": {"role": "assistant"},
        "start_anchor": "<|im_start|>assistant\n",
        "fields": {"thinking": THINKING, "tool_calls": calls, "content": CONTENT} | fields,
    }


HERMES = template(
    {
        "open": "<tool_call>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "json",
        "transform": {"type": "function", "function": "{content}"},
    }
)
XML = template(
    {
        "open_pattern": r"<tool_call>\s*<function=(?P<name>\w+)>",
        "close": "</tool_call>",
        "repeats": True,
        "content": "xml-inline",
        "content_args": {
            "tag_pattern": r"<parameter=(?P<key>\w+)>\s*(?P<value>.*?)\s*</parameter>",
            "value_parser": {"name": "json", "args": {"allow_non_json": True}},
        },
        "transform": FUNCTION,
    }
)
COMMAND = template(
    {
        "open": "<|START_ACTION|>",
        "close": "<|END_ACTION|>",
        "content": "json",
        "transform_each": True,
        "transform": {
            "type": "function",
            "function": {"name": "{tool_name}", "arguments": "{parameters}"},
        },
    },
    thinking={"open": "<|START_THINKING|>", "close": "<|END_THINKING|>"},
    content={"open": "<|START_RESPONSE|>", "close": "<|END_RESPONSE|>"},
)
GEMMA = template(
    {
        "open_pattern": r"<start_function_call>call:(?P<name>[\w.]+)",
        "close": "<end_function_call>",
        "repeats": True,
        "content": "json",
        "content_args": {"unquoted_keys": True, "string_delims": [["<escape>", "<escape>"]]},
        "transform": FUNCTION,
    }
)
NAMED = template(
    {
        "open_pattern": r"<call name=\"(?P<name>.+?)\">",
        "close": "</call>",
        "repeats": True,
        "content": "json",
        "transform": FUNCTION,
    }
)
LFM = template(
    {
        "open": "<|tool_call_start|>",
        "close": "<|tool_call_end|>",
        "content": "python-call-list",
        "transform_each": True,
        "transform": {
            "type": "function",
            "function": {"name": "{name}", "arguments": "{arguments}"},
        },
    }
)
CASES = [
    (HERMES, "<think>\nHm.\n</think>\n\nI look."),
    (HERMES, '<think>Hm.</think><tool_call>{"name": "now", "arguments": {}}</tool_call>'),
    (
        HERMES,
        'So.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
        '<tool_call>{"name": "search", "arguments": {"tags": ["a", "}"]}}</tool_call>',
    ),
    (
        XML,
        "<tool_call>\n<function=weather>\n<parameter=city>\nNew York\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ),
    (XML, "<tool_call><function=now></function></tool_call>"),
    (
        COMMAND,
        "<|START_THINKING|>I plan.<|END_THINKING|><|START_ACTION|>[\n"
        '    {"tool_call_id": "0", "tool_name": "weather", "parameters": {"city": "Rome"}},\n'
        '    {"tool_call_id": "1", "tool_name": "now", "parameters": {}}\n]<|END_ACTION|>',
    ),
    (COMMAND, "<|START_RESPONSE|>Hello.<|END_RESPONSE|>"),
    (
        GEMMA,
        "<start_function_call>call:weather{city:<escape>Rome, {IT}<escape>,days:3}"
        "<end_function_call><start_function_call>call:now{}<end_function_call>",
    ),
    (NAMED, 'Yes.<call name="search">{"query": "a </b>", "limit": null}</call>'),
    (LFM, "<|tool_call_start|>[weather(city='Rome', days=2), now()]<|tool_call_end|>"),
]


@pytest.mark.parametrize(("spec", "output"), CASES)
def test_outputs_are_read_as_transformers_reads_them(spec: dict[str, Any], output: str) -> None:
    message = parse_response(output, spec, prefix="")
    wanted = [
        (call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls", [])
    ]
    family = read_response_template(spec)
    for events in every_cut(family, output).values():
        assert calls_of(events) == wanted
        for kind, field in (("text", "content"), ("reasoning", "thinking")):
            found = "".join(event[-1] for event in events if event[0] == kind)
            assert found.strip() == message.get(field, "")


def test_tokens_of_the_vocabulary_are_known_by_their_ids() -> None:
    added = ["<tool_call>", "</tool_call>"]
    family = read_response_template(HERMES, added)
    assert set(family.marks.values()) == set(added)
    vocabulary = vocabularies(family)["tokens"]
    output = '<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    plain = [(token % 900, piece) for token, piece in atoms(output, vocabulary)]
    assert run(family, vocabulary, plain, tools=TOOLS) == [("text", output)]
    assert calls_of(run(family, vocabulary, joined(atoms(output, vocabulary)))) == [("now", {})]


CALLS: dict[str, Any] = HERMES["fields"]["tool_calls"]


def changed(**fields: Any) -> dict[str, Any]:
    return template({key: value for key, value in (CALLS | fields).items() if value is not None})


def quoted(delimiters: Any) -> dict[str, Any]:
    return template(GEMMA["fields"]["tool_calls"] | {"content_args": {"string_delims": delimiters}})


def tagged(pattern: Any) -> dict[str, Any]:
    return template(XML["fields"]["tool_calls"] | {"content_args": {"tag_pattern": pattern}})


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ([], "response_template must be an object"),
        ({"version": 2, "fields": {}}, "version is 2; version 1 is read"),
        ({"fields": {}}, "fields must be an object with fields"),
        ({"fields": {"x": {}}, "start": 1}, r"response_template\.start is not known"),
        (template(CALLS, images={"open": "<i>"}), "fields.images is no field that is read"),
        (changed(opens="<"), "tool_calls.opens is not known"),
        (changed(open=None), "has neither open nor open_pattern"),
        (changed(open=[1]), "neither a text nor a list of texts"),
        (changed(open_pattern="<"), "has both open and open_pattern"),
        (changed(content="kv-lines"), "content 'kv-lines' is not read for calls"),
        (changed(transform={"function": "{other}"}), "transform is not read"),
        (changed(open=None, open_pattern=r"<\|a\|>.*?<b>"), r"open_pattern that is not read from"),
        (changed(open=None, open_pattern=r"<(?P<name>\w+)"), "does not end with a literal"),
        (changed(close=None, close_pattern="a|b"), "has a close_pattern where only a literal"),
        (template({}, thinking={"open": "<t>"}), "text between two literals only"),
        (changed(content_args=1), "has content_args that are no object"),
        (template(GEMMA["fields"]["tool_calls"] | {"open_pattern": ""}), "does not end with a lit"),
        (changed(open=None, open_pattern=r"<(?P<1a>\w+)>"), "with 1a as the name of a group"),
        (changed(open=None, open_pattern=r"<(?P<a>\w+)>(?P<a>\w+)<"), "with a as the name"),
        (changed(open=None, open_pattern=r"<(?P<name>\w+)>"), "though the content holds the names"),
        (quoted(-1), "has string_delims that are read only as one quote"),
        (quoted([{}]), "has string_delims that are read only as one quote"),
        (quoted([["a"]]), "has string_delims that are read only as one quote"),
        (tagged(1), "tag_pattern or merge_duplicates that is not read: '1'"),
        (changed(open=None, open_pattern="<(?P<name>[z-a]+)>"), "which is no class"),
    ],
)
def test_what_is_not_read_is_refused_by_name(spec: Any, message: str) -> None:
    with pytest.raises(BadResponseTemplate, match=message):
        read_response_template(spec)
