from __future__ import annotations

import pytest
from support.tokenizer.output.replay import Case, call, check, reasoning, text

from penstock.services.tokenizer.output.families import FAMILIES

ONE = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
CASES = [
    Case("", []),
    Case("Hello, world.", [text("Hello, world.")]),
    Case(" two\n\nlines \n", [text(" two\n\nlines \n")]),
    Case(ONE, [call("weather", {"city": "Rome"})]),
    Case("I look.\n" + ONE, [text("I look."), call("weather", {"city": "Rome"})]),
    Case(
        ONE + "\n" + ONE.replace("Rome", "Oslo") + "\n",
        [call("weather", {"city": "Rome"}), call("weather", {"city": "Oslo"})],
    ),
    Case(ONE + "\nDone.", [call("weather", {"city": "Rome"}), text("Done.")]),
    Case(
        "<think>\nWhat now?\n</think>\n\n" + ONE,
        [reasoning("What now?"), call("weather", {"city": "Rome"})],
    ),
    Case("Right.</think>\n\nSunny.\n", [reasoning("Right."), text("Sunny.\n")], in_reasoning=True),
    Case(
        "I will call it. " + ONE + "</think>Done",
        [reasoning("I will call it."), call("weather", {"city": "Rome"}), text("Done")],
        in_reasoning=True,
    ),
    Case(
        "I could write <tool_call> here.</think>Yes",
        [reasoning("I could write <tool_call> here."), text("Yes")],
        in_reasoning=True,
    ),
    Case("never ends \n", [reasoning("never ends \n")], in_reasoning=True),
    Case("<think></think>Hi", [text("Hi")]),
    Case('<tool_call>{"name": "now"}</tool_call>', [call("now")]),
    Case('<tool_call>{"name": "now", "arguments": {}}</tool_call>', [call("now")]),
    Case('<tool_call>{"name": "now", "arguments": null}</tool_call>', [call("now")]),
    Case(
        '<tool_call>{"name":"weather","arguments":{"city":"a \\"}</to\\\\"}}</tool_call>',
        [call("weather", {"city": 'a "}</to\\'})],
    ),
    Case(
        '<tool_call>{"name": "search", "arguments": {"query": "\\u00e9\\ud83d\\ude00 é😀", '
        '"filters": {"a": [1, {"b": "]}"}, [], {}]}}}\n</tool_call>',
        [call("search", {"query": "é😀 é😀", "filters": {"a": [1, {"b": "]}"}, [], {}]}})],
    ),
    Case(
        '<tool_call>{"name": "weather", "arguments": "{\\"city\\": \\"Rome\\"}"}</tool_call>',
        [call("weather", {"city": "Rome"})],
    ),
    Case(
        '<tool_call>{"type": "function", "name": "now", "parameters": {}, "id": "x"}</tool_call>',
        [call("now")],
    ),
    Case(
        '<tool_call>{"name": "other", "arguments": {"x": 1}}</tool_call>', [call("other", {"x": 1})]
    ),
    Case(
        '<tool_call>{"name": "now", "arguments": {}}{"name": "now"}</tool_call>',
        [call("now"), call("now")],
    ),
    Case('<tool_call>{"name": "now", "arguments": {}} Bye', [call("now"), text("Bye")]),
    Case(
        '<tool_call>{"name": "now", "arguments": {}}\n<tool_call>{"name": "now"}',
        [call("now"), call("now")],
    ),
    Case(
        '<tool_call>{"name": "weather", "arguments": {"city": "Ro',
        [call("weather", '{"city": "Ro')],
    ),
    Case(
        '<tool_call>{"name": "weather", "arguments": {"city": 1</tool_call>\nSo.',
        [call("weather", {"city": 1}), text("So.")],
    ),
    Case('<tool_call>{"name": "weath', [text('<tool_call>{"name": "weath')]),
    Case("<tool_call>", [text("<tool_call>")]),
    Case("a <tool_call>\n", [text("a <tool_call>\n")]),
    Case("<tool_call>nothing</tool_call>", [text("<tool_call>nothing</tool_call>")]),
    Case(
        "<tool_call><tool_call>\n" + ONE,
        [text("<tool_call><tool_call>"), call("weather", {"city": "Rome"})],
    ),
    Case("if a <tool then </tool_call>", [text("if a <tool then </tool_call>")]),
    Case("The answer.</think> ok", [text("The answer.</think> ok")]),
    Case(" " * 100 + ONE, [text(" " * 36), call("weather", {"city": "Rome"})]),
    Case("a" + "\n" * 100 + "b", [text("a" + "\n" * 100 + "b")]),
    Case("one<|im_end|> two", [text("one two")]),
    Case(
        '<tool_call>{"name": "x" 1}</tool_call>', [text('<tool_call>{"name": "x" 1}</tool_call>')]
    ),
    Case(
        '<tool_call>{"name": "now", "arguments": {}, "note": {"deep": [1]}}</tool_call>',
        [call("now")],
    ),
    Case(
        '<tool_call>{"name": "now", "arguments": {} oops}</tool_call>',
        [call("now"), text("oops}</tool_call>")],
    ),
    Case('<tool_call>{"name": "now", "arguments": 5}</tool_call>', [call("now", "5")]),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.output[:40])
def test_an_output_gives_its_events_however_it_is_cut(case: Case) -> None:
    check(FAMILIES["json_tags"], case)


def test_tags_of_another_name_are_read_alike() -> None:
    output = ONE.replace("tool_call", "longcat_tool_call")
    check(FAMILIES["json_tags_longcat"], Case(output, [call("weather", {"city": "Rome"})]))
