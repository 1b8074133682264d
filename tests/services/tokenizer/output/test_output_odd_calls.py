"""Calls with whatever strings hold, written in every wire form, come back as they were."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from support.tokenizer.output.replay import atoms, joined, run, vocabularies
from support.tokenizer.output.wire_forms import FORMS, Call, Form

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.family import Family

STRINGS = [
    "", " ", "plain", 'with "double" quotes', "it's 'single' quotes", "'", '"', "\\", "\\\\'",
    '\\"', "\u200b\u202e",
    "two\nlines\n", "\n", "tab\there", "\r\n", "{", "}", "[]", "}}]})", '{"a": [1, "x"]}', "a, b=c",
    "f(x='y')", "')", "'), g(", "é ü ß", "日本語 水", "😀👍🏽", "null", "5", "-1.50",
    "true", "None", "<b>bold</b>", "</", "<", "a < b && c > d", "<think>no</think>", "<tool_call>",
    "</tool_call>", "</parameter>", "<|call|>", "[TOOL_CALLS]", "[ARGS]", "<|END_ACTION|>",
    "<end_function_call>", "<tool_call|>", "<escape>", "```json\n{}\n```", "\\u0041 \\n", "x" * 300,
    "to=functions.f", "<|start|>assistant", "%s {name} $HOME `ls`", ": , : ,", "\x01\x1f",
]  # fmt: skip
NUMBERS = [0, -1, 7, 2**53, -(10**20), 0.5, -1.25e-7, 1e22, 3.0]
TOOLS: dict[str, Any] = {
    "note": {"type": "object", "properties": {"text": {"type": "string"}}},
    "do.it-2": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "count": {"type": "integer"},
            "share": {"type": "number"},
            "sure": {"type": "boolean"},
            "items": {"type": "array"},
            "options": {"type": "object"},
        },
    },
    "now": {"type": "object", "properties": {}},
}
TYPES = {
    tool: {key: one["type"] for key, one in schema["properties"].items()}
    for tool, schema in TOOLS.items()
}


def odd_calls(count: int, seed: int) -> list[list[Call]]:
    """Outputs of one to three calls."""
    draw = random.Random(seed)

    def value(depth: int) -> Any:
        kind = draw.randrange(6 if depth else 4)
        if kind == 4:
            return [value(depth - 1) for _ in range(draw.randrange(4))]
        if kind == 5:
            return {
                draw.choice(["a", "b c", "d-e", "é", "f.g"]): value(depth - 1)
                for _ in range(draw.randrange(3))
            }
        return [draw.choice(STRINGS), draw.choice(NUMBERS), draw.random() < 0.5, None][kind]

    def call() -> Call:
        tool = draw.choice(["note", "do.it-2", "do.it-2", "now"])
        if tool == "note":
            return tool, {"text": draw.choice(STRINGS)}
        if tool == "now":
            return tool, {}
        everything = {
            "name": draw.choice(STRINGS) + draw.choice(STRINGS),
            "count": draw.choice([0, -3, 12345]),
            "share": draw.choice(NUMBERS),
            "sure": draw.random() < 0.5,
            "items": [value(2) for _ in range(draw.randrange(4))],
            "options": {"x": value(2), "y": value(1)},
        }
        keys = draw.sample(list(everything), draw.randint(0, len(everything)))
        return tool, {key: everything[key] for key in keys}

    fixed: list[list[Call]] = [[("note", {"text": text})] for text in STRINGS]
    return fixed + [[call() for _ in range(draw.randint(1, 3))] for _ in range(count)]


def calls_of(events: list[tuple[Any, ...]]) -> list[Call]:
    names = [event[3] for event in events if event[0] == "call"]
    texts = {event[1]: event[2] for event in events if event[0] == "arguments"}
    return [(name, json.loads(texts[index])) for index, name in enumerate(names)]


LEAST_CARRIED = 0.3
"""Of the outputs, which share a form can write."""


@pytest.mark.parametrize("count", [12, pytest.param(150, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FORMS)
def test_calls_come_back_as_they_were_written(name: str, count: int) -> None:
    form = FORMS[name]
    family = FAMILIES[form.family]
    draw = random.Random(name)
    prepared = list(vocabularies(family).values())
    carried = 0
    corpus = odd_calls(count, seed=1)
    for calls in corpus:
        if any(form.lacks(call, TYPES) for call in calls) or _named(form, family, calls):
            continue
        carried += 1
        output = form.write(calls)
        for vocabulary in prepared:
            pieces = atoms(output, vocabulary)
            whole = run(family, vocabulary, joined(pieces), tools=TOOLS)
            assert [event for event in whole if event[0] in ("text", "reasoning")] == [], output
            assert calls_of(whole) == calls, output
            found = run(family, vocabulary, _cut(pieces, draw), tools=TOOLS)
            assert found == whole, output
    assert carried > LEAST_CARRIED * len(corpus)


def _cut(pieces: list[tuple[int, str]], draw: random.Random) -> list[tuple[int, str]]:
    """Plain pieces joined at random."""
    result: list[tuple[int, str]] = []
    for token, piece in pieces:
        if result and token < 999 and result[-1][0] < 999 and draw.random() < 0.6:
            result[-1] = (token, result[-1][1] + piece)
        else:
            result.append((token, piece))
    return result


def _named(form: Form, family: Family, calls: list[Call]) -> bool:
    """Whether a mark of the family, which would be a token here, stands within a call's texts."""
    marks = set(family.marks.values())
    if family.reasoning is not None:
        marks |= {family.reasoning.open, family.reasoning.close}
    texts = json.dumps(calls, ensure_ascii=False)
    return any(mark in texts for mark in marks)


@pytest.mark.parametrize("name", [name for name in FORMS if not name.startswith("XML")])
def test_marks_within_strings_are_text(name: str) -> None:
    """Where a mark is a token, its text may stand in a string as other tokens, or as itself where
    the form says what is a string."""
    form = FORMS[name]
    family = FAMILIES[form.family]
    vocabulary = vocabularies(family)["tokens"]
    for mark in family.marks.values():
        if '"' in mark:
            continue
        output = form.write([("note", {"text": "a \ue000 b"}), ("now", {})])
        plain = [
            (token, piece.replace("\ue000", mark)) for token, piece in atoms(output, vocabulary)
        ]
        for pieces in (plain, joined(plain)):
            events = run(family, vocabulary, pieces, tools=TOOLS)
            assert calls_of(events) == [("note", {"text": f"a {mark} b"}), ("now", {})]
