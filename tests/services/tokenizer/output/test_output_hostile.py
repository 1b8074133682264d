from __future__ import annotations

import functools
import time

import pytest
from growth import LINEAR, fourfold
from replay import TOOLS, run, vocabularies

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.machine import Machine, build_machine
from penstock.services.tokenizer.output.parser import MAX_CALLS, MAX_PARAMETERS, OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

SIZE = 1 << 14
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
        (IN_JSON, "<"),
        (IN_JSON, "</tool_cal"),
        (IN_JSON + '"', "</tool_call>"),
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
    ],
    "xml_pairs": [("", "<tool_call>f"), ("<tool_call>f<arg_key>a", "<arg_key>")],
    "xml_pairs_hunyuan": [("", "<tool_calls>\n<tool_call>")],
    "xml_invoke_minimax": [("", '<minimax:tool_call><invoke name="f'), ("", "<minimax:tool_call>")],
    "special_tokens_kimi": [("", "<|tool_call_begin|>functions.f:1")],
    "special_tokens_deepseek_v3": [("", "<｜tool▁call▁begin｜>function<｜tool▁sep｜>")],
    "json_array_mistral": [("", "[TOOL_CALLS]"), ("", '[TOOL_CALLS][{"name": "')],
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
    ],
    "own_quoting_functiongemma": [
        ("<start_function_call>call:f{a:", "<escape>"),
        ("<start_function_call>call:f{a:<escape>", "<"),
        ("<start_function_call>call:f{a:", "{a:"),
    ],
    "harmony": [
        ("", "<|channel|>"),
        ("", "<|end|>"),
        ("", "<|start|>assistant"),
        ("<|channel|>", "commentary "),
        ("<|channel|>commentary ", "to=functions.f "),
        ("<|channel|>analysis<|message|>", "<|"),
    ],
}
CASES = [(name, *case) for name, cases in HOSTILE.items() for case in cases]


@functools.cache
def machine_of(family: str) -> Machine:
    return build_machine(FAMILIES[family], vocabularies(FAMILIES[family])["text"])


def cost(family: str, begin: str, part: str, size: int, piece: int) -> float:
    """Seconds of CPU for an output of ``size`` characters in pieces."""
    machine = machine_of(family)
    output = begin + part * (size // len(part))
    pieces = [output[at : at + piece] for at in range(0, len(output), piece)]
    parser = OutputParser(machine, ToolSchemas(TOOLS), lambda index, name: "id")
    started = time.process_time()
    for one in pieces:
        parser.push(1, one)
    parser.finish()
    return time.process_time() - started


@pytest.mark.parametrize(("family", "begin", "part"), CASES)
def test_the_cost_of_an_output_grows_with_its_length_alone(
    family: str, begin: str, part: str
) -> None:
    assert fourfold(lambda size: cost(family, begin, part, size, size), SIZE) < LINEAR
    assert fourfold(lambda size: cost(family, begin, part, size, 24), SIZE) < LINEAR


def test_calls_and_parameters_beyond_every_use_are_content() -> None:
    family = FAMILIES["xml_parameters"]
    vocabulary = vocabularies(family)["text"]
    calls = "<function=now></function>"
    events = run(family, vocabulary, [(1, calls * (MAX_CALLS + 2))])
    assert sum(event[0] == "call" for event in events) == MAX_CALLS
    assert events[-1] == ("text", calls * 2)
    parameter = "<parameter=x>1</parameter>"
    output = "<function=now>" + parameter * (MAX_PARAMETERS + 1) + "</function>"
    _, arguments, rest = run(family, vocabulary, [(1, output)])
    assert arguments[-1].count('"x": 1') == MAX_PARAMETERS
    assert arguments[-1].endswith("1}")
    assert rest == ("text", parameter + "</function>")
