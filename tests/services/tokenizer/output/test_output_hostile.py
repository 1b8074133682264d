from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from typing import Any

import pytest
from support.growth import LINEAR, sixteenfold
from support.tokenizer.output.hostile import Hostile, drawn, instructions_of, seconds, steps
from support.tokenizer.output.replay import run, vocabularies

from penstock.protocol.wire.messages.tokens import MAX_CALLS
from penstock.services.tokenizer.output.budget import MAX_PARTS
from penstock.services.tokenizer.output.families import FAMILIES

SIZE = 1 << 14
COUNTED = 1 << 8
IN_JSON = '<tool_call>{"name": "f", "arguments": {"a": '
IN_VALUE = "<function=weather><parameter=city>"
HOSTILE = {
    "json_tags": [
        ("", "<tool_call>"),
        ("", "<"),
        ("", "{"),
        ("", " "),
        ("", "</think><think>"),
        ("", '<tool_call>{"name": "'),
        ("", '<tool_call>{"name": "f"}'),
        ('<tool_call>{"name": "', "a"),
        ('<tool_call>{"name": "f", "arguments": ', "1"),
        ('<tool_call>{"name": "f", "arguments": "', "\\"),
        (IN_JSON, "{"),
        (IN_JSON, "{ "),
        (IN_JSON, "{{{{{}}}}}"),
        (IN_JSON, '""'),
        (IN_JSON, '"\\n"'),
        (IN_JSON, '{"'),
        (IN_JSON, "[{}"),
        (IN_JSON, ': {"x": '),
        (IN_JSON, "<"),
        (IN_JSON, "{<}"),
        (IN_JSON, "[" * 1000 + "]" * 1000),
        (IN_JSON, "</tool_cal"),
        (IN_JSON + '"', "</tool_call>"),
        ("", IN_JSON + "[" + "{}," * 300 + "</tool_call>"),
        ("", '<tool_call>{"name": "f", "arguments": "' + "{" * 900 + '"}</tool_call>'),
    ],
    "xml_parameters": [
        ("", "<function="),
        ("", "<tool_call>\n<function=f"),
        ("<function=f>", "<parameter=a>"),
        ("<function=f>", "<parameter=a></parameter>"),
        (IN_VALUE, "<"),
        (IN_VALUE, "\n"),
        (IN_VALUE, '"'),
        ("<function=weather><parameter=days>", "["),
        ("<function=search><parameter=tags>", "(1,"),
        ("<function=search>", "<parameter=tags>[x]</parameter>"),
        ("<function=search>", f"<parameter=tags>({'1,' * 200})</parameter>"),
    ],
    "xml_pairs": [("", "<tool_call>f"), ("<tool_call>f<arg_key>a", "<arg_key>")],
    "xml_pairs_hunyuan": [("", "<tool_calls>\n<tool_call>")],
    "xml_invoke_minimax": [("", '<minimax:tool_call><invoke name="f'), ("", "<minimax:tool_call>")],
    "kimi_channels": [
        ("", "<|open|>"),
        ("", '<|open|>call tool="f'),
        ('<|open|>call tool="f"<|sep|>', '<|open|>argument key="a" type="string"<|sep|>'),
    ],
    "inkling": [("", "<|message_model|>f"), ("<|message_model|>", "a")],
    "muse": [("", "<|start|>assistant to=f"), ("", " to=self<|message|>")],
    "special_tokens_kimi": [("", "<|tool_call_begin|>functions.f:1")],
    "special_tokens_deepseek_v3": [("", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>")],
    "json_array_mistral": [
        ("", "[TOOL_CALLS]"),
        ("", '[TOOL_CALLS][{"name": "'),
        ("", '[TOOL_CALLS]now[ARGS]{"a": [' + "{}," * 300 + "1]}"),
        ("", '[TOOL_CALLS]now[ARGS]{"' + "\\n" * 450 + '": 1}'),
        ("", '[TOOL_CALLS]now[ARGS]{}"' + "a" * 900 + '"'),
    ],
    "bare_json": [("", '{"name": "weather"')],
    "python_calls": [
        ("[weather(city='", "'"),
        ("[weather(city='", "' "),
        ("[weather(city='", "\\"),
        ("[weather(city='", "\\u0041"),
        ("[weather(city=", "'a"),
        ("[weather(city=", "<"),
        ("[weather(city=", "a=1,"),
        ("[weather(city=", "["),
        ("[weather(city=[", "a,"),
        ("[weather(city={", "'a':"),
        ("[weather(", " "),
        ("[", "weather(a=1), "),
        ("[", "weather(" + "1," * 500 + "), "),
    ],
    "own_quoting_functiongemma": [
        ("<start_function_call>call:f{a:", "<escape>"),
        ("<start_function_call>call:f{a:<escape>", "<"),
        ("<start_function_call>call:f{a:", "{a:"),
        ("<start_function_call>call:f{a:<escape>", "<end_function_call>"),
        ("<start_function_call>call:f{a:[", "<escape>''"),
    ],
    "harmony": [
        ("", "<|channel|>"),
        ("", "<|end|>"),
        ("", "<|start|>assistant"),
        ("<|channel|>", "commentary "),
        ("<|channel|>commentary ", "to=functions.f "),
        ("<|channel|>analysis<|message|>", "<|"),
        ("<|channel|>commentary to=functions.f<|message|>", "|call|><"),
    ],
}
CASES = [Hostile(name, "text", *case) for name, cases in HOSTILE.items() for case in cases]


def in_the_long_run(cases: Iterable[Hostile]) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


PLAIN = Hostile("json_tags", "text", "", "word")
LONG, LONGEST = 1 << 18, 1 << 20
MOST_PLAIN = 6.0
"""What a hostile text may cost, in units of a plain one that comes in pieces of 4 characters. That
one takes about 0.05 s for a million."""
MOST_BUSY = 30.0
"""The same on a machine that does other things as well. Where patterns are matched again for each
character of a quarter of a million, it is hundreds."""
MOST_INSTRUCTIONS = 40
"""The same in instructions: fewer than 28, of which each does less than one of a plain text's."""
INSTRUCTED = 1 << 13


def least(case: Hostile, size: int, tries: int, piece: int | None = None) -> float:
    return min(seconds(case, size, piece) for _ in range(tries))


@functools.cache
def plain_cost(size: int) -> float:
    return least(PLAIN, size, 5, piece=4)


@functools.cache
def plain_instructions() -> int:
    instructions_of(PLAIN, COUNTED, piece=4)  # what is made at the first use counts for none
    return instructions_of(PLAIN, INSTRUCTED, piece=4)


def times_plain(case: Hostile, size: int, most: float = MOST_PLAIN) -> float:
    """The least cost in units of a plain text's. The machine's speed changes, so both are measured
    again, side by side, where that is too much."""
    found = least(case, size, 1) / plain_cost(size)
    for _ in range(4):
        if found > most:
            found = min(found, least(case, size, 3) / least(PLAIN, size, 3, piece=4))
    return found


@pytest.mark.parametrize(
    "case",
    [*CASES[::2], *in_the_long_run(CASES[1::2]), *in_the_long_run(drawn(20, seed=7))],
    ids=str,
)
def test_the_steps_for_an_output_grow_with_its_length_alone(case: Hostile) -> None:
    size = len(case.part) * max(4, COUNTED // len(case.part))
    steps(case, size)  # what is made at the first use counts for none
    for piece in (None, 24, 1):
        one, two, four = (steps(case, size * times, piece) for times in (1, 2, 4))
        assert four - two <= 2.2 * (two - one) + 100  # where cost is quadratic: four times as much


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_cost_of_an_output_grows_with_its_length_alone(case: Hostile) -> None:
    assert sixteenfold(lambda size: seconds(case, size), SIZE) < LINEAR
    assert sixteenfold(lambda size: seconds(case, size, piece=24), SIZE) < LINEAR


EVERY = [*CASES, *drawn(40, seed=5)]
THIRDS = [EVERY[first::3] for first in range(3)]


@pytest.mark.parametrize("case", [*THIRDS[0], *in_the_long_run(THIRDS[1] + THIRDS[2])], ids=str)
def test_a_hostile_text_takes_few_instructions_more_than_one_of_words(case: Hostile) -> None:
    instructions_of(case, COUNTED)
    assert instructions_of(case, INSTRUCTED) < MOST_INSTRUCTIONS * plain_instructions()


@pytest.mark.parametrize("case", [*THIRDS[1], *in_the_long_run(THIRDS[0] + THIRDS[2])], ids=str)
def test_a_long_hostile_text_costs_little_more_than_one_of_words(case: Hostile) -> None:
    """What no count of instructions shows, as the matching of patterns; the long run has a megabyte
    and a closer limit."""
    assert times_plain(case, LONG, MOST_BUSY) < MOST_BUSY


@pytest.mark.slow
def test_a_megabyte_of_any_hostile_text_costs_little_more_than_one_of_words() -> None:
    cases = [*CASES, *drawn(2000, seed=6)]
    assert [case for case in cases if times_plain(case, LONGEST) > MOST_PLAIN] == []


def test_a_token_in_which_nothing_matches_takes_few_instructions() -> None:
    assert plain_instructions() / (INSTRUCTED / 4) < 50


@pytest.mark.slow
def test_a_token_in_which_nothing_matches_takes_less_than_a_microsecond() -> None:
    assert least(PLAIN, LONGEST, 5, piece=4) / (LONGEST / 4) < 1e-6


def test_calls_and_parts_beyond_every_use_are_content() -> None:
    family = FAMILIES["xml_parameters"]
    vocabulary = vocabularies(family)["text"]
    calls = "<function=now></function>"
    events = run(family, vocabulary, [(1, calls * (MAX_CALLS + 2))])
    assert sum(event[0] == "call" for event in events) == MAX_CALLS
    assert events[-1] == ("text", calls * 2)
    parameter = "<parameter=x>1</parameter>"
    output = "<function=now>" + parameter * (MAX_PARTS // 2 + 1) + "</function>"
    for pieces in ([(1, output)], [(1, character) for character in output]):
        _, arguments, rest = run(family, vocabulary, pieces)
        assert arguments[-1].count('"x": 1') == MAX_PARTS // 2
        assert arguments[-1].endswith("1}")
        assert rest == ("text", "</parameter>" + parameter + "</function>")


def test_values_of_calls_that_are_too_many_together_go_out_as_they_stand() -> None:
    family = FAMILIES["python_calls"]
    parts = 3 * MAX_PARTS // 4
    call = "now(" + "a=1," * (parts // 2) + ")"
    events = run(family, vocabularies(family)["text"], [(1, f"[{call}, {call}]")])
    texts = [event[-1] for event in events if event[0] == "arguments"]
    assert len(json.loads(texts[0], object_pairs_hook=list)) == parts // 2
    assert texts[1].endswith("a=1,a=1,")
