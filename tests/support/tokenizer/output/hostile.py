"""Texts that cost a parser the most: a beginning that leads into one of its states, then one text
again and again."""

from __future__ import annotations

import functools
import random
import time
from collections.abc import Iterator
from typing import NamedTuple

from support.counted import calls, instructions
from support.tokenizer.output.replay import TOOLS, Piece, atoms, joined, machine_of, vocabularies
from support.tokenizer.output.wire_forms import FORMS
from support.tokenizer.output.written import written

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.output.machine import Machine, Vocabulary
from penstock.services.tokenizer.output.parser import OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

_CALLS = [
    ("weather", {"city": "Rome", "days": 3}),
    ("search", {"query": "a b", "filters": {"x": [1, {"y": None}]}, "tags": ["u"]}),
    ("now", {}),
]
_SYNTAX = [
    "<", ">", "{", "}", "[", "]", "(", ")", '"', "'", "\\", ",", ":", " ", "\n", "\t", ";", "=",
    "a", "0", "1", "-", ".", "e", "é", "😀", "</", "<|", '{"', '"}', "[{", "}]", "'}", "a=", "a:",
    "''", '""', "\\u", "\\ud83d", "\\x", "```", ", ", "} ", "{ ", "true", "null", "1,", "a,",
    '"a":', '"a":1,', "'a':", "<a", "</a>", "[]", "{}", "()", "(1,", "{{{{{", "]]]]]", "[[}}",
    "[x]", '[{}', '{"":[', " <", " {", " '", ' "', "\n<",
]  # fmt: skip


class Hostile(NamedTuple):
    family: str
    vocabulary: str
    """``text``: no mark is a token; ``tokens``: all are, so their texts are no marks."""
    begin: str
    part: str


def drawn(count: int, seed: int) -> Iterator[Hostile]:
    """Generated ones, the same for the same seed."""
    draw = random.Random(seed)
    for _ in range(count):
        name = draw.choice(sorted(FAMILIES))
        output = draw.choice(_outputs(name))
        begin = output[: draw.randrange(len(output) + 1)] if draw.random() < 0.9 else ""
        part = "".join(_part(draw, name, output) for _ in range(draw.choice([1, 1, 1, 2, 2, 3])))
        yield Hostile(name, draw.choice(["text", "tokens"]), begin, part)


@functools.cache
def _outputs(name: str) -> list[str]:
    family = FAMILIES[name]
    found = [form.write(_CALLS) for form in FORMS.values() if form.family == name]
    if family.envelope is not None:
        found.append(written(family, _CALLS))
    if family.reasoning is not None:
        begin = family.reasoning.open + family.reasoning.label
        found += [f"{begin}\nhm {one}" for one in found]
    return found


def _part(draw: random.Random, name: str, output: str) -> str:
    family = FAMILIES[name]
    marks = list(family.marks.values())
    if family.reasoning is not None:
        marks += [family.reasoning.open, family.reasoning.close]
    chance = draw.random()
    if chance < 0.35 or not marks:
        return draw.choice(_SYNTAX)
    if chance < 0.6:
        mark = draw.choice(marks)
        return mark if draw.random() < 0.5 else mark[: draw.randrange(1, len(mark) + 1)]
    start = draw.randrange(len(output))
    return output[start : start + draw.choice([1, 2, 4, 8, 16, 32, 64, 200])]


@functools.cache
def _machine(family: str, vocabulary: str) -> tuple[Machine, Vocabulary]:
    found = vocabularies(FAMILIES[family])[vocabulary]
    return machine_of(FAMILIES[family], found), found


def _pushed(case: Hostile, size: int, piece: int | None) -> tuple[OutputParser, list[Piece]]:
    """A parser, and so many characters of the part at once or in pieces of a size."""
    machine, vocabulary = _machine(case.family, case.vocabulary)
    pieces = joined(atoms(case.begin, vocabulary))
    text = case.part * (size // len(case.part))
    step = piece or size
    pieces += [(1, text[at : at + step]) for at in range(0, len(text), step)]
    return OutputParser(machine, ToolSchemas(TOOLS), lambda index, name: f"id {index}"), pieces


def steps(case: Hostile, size: int, piece: int | None = None) -> int:
    """Functions that are called for so many characters of the part, and characters that a push
    leaves for the next one to read again: the same on every machine."""
    parser, pieces = _pushed(case, size, piece)
    count = 0
    for token, one in pieces:
        count += calls(functools.partial(parser.push, token, one)) + len(parser._held)
    return count + calls(parser.finish)


def instructions_of(case: Hostile, size: int, piece: int | None = None) -> int:
    """Instructions of the interpreter for so many characters of the part."""
    parser, pieces = _pushed(case, size, piece)

    def push() -> None:
        for token, one in pieces:
            parser.push(token, one)
        parser.finish()

    return instructions(push)


def seconds(case: Hostile, size: int, piece: int | None = None) -> float:
    """CPU time for so many characters of the part, pushed at once or in pieces of a size."""
    parser, pieces = _pushed(case, size, piece)
    started = time.process_time()
    for token, one in pieces:
        parser.push(token, one)
    parser.finish()
    return time.process_time() - started
