"""Runs an output through a family's parser in every cut, and says what came of it.

A case is a text and what is expected of it. ``check`` runs it with the family's marks as text and
as tokens of their own, whole, by characters, by tokens of several sizes, cut at each place and at
random places: the events are the same.
"""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from penstock.protocol.wire.messages.tokens import (
    Content,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallOpened,
)
from penstock.services.tokenizer.output.family import Family
from penstock.services.tokenizer.output.machine import Vocabulary, build_machine
from penstock.services.tokenizer.output.parser import MakeId, OutputParser
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

TOOLS: dict[str, Any] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "celsius": {"type": "boolean"},
        },
        "required": ["city"],
    },
    "search": {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "filters": {"type": "object"},
            "tags": {"$ref": "#/$defs/tags"},
            "score": {"type": "number"},
        },
        "$defs": {"tags": {"type": "array", "items": {"type": "string"}}},
    },
    "now": {"type": "object", "properties": {}},
}
KINDS = ("text", "tokens")
"""Vocabularies without any added token of a family's marks, and with all of them."""
MOST_CUTS = 6
"""Of one stretch of text, at once."""
FAR = 12
"""Characters between two cuts of which neither is likely to hide what the other does."""
EXTRA_SPECIAL = "<|im_end|>"
"""A special token that is no mark of any family."""


class Answer(NamedTuple):
    """A stretch of content or reasoning."""

    kind: str
    text: str


class Call(NamedTuple):
    """A call. ``arguments``: the object that they are, or their exact text."""

    name: str
    arguments: Any
    id: str | None = None


Item = Answer | Call


def text(content: str) -> Answer:
    return Answer("text", content)


def reasoning(content: str) -> Answer:
    return Answer("reasoning", content)


def call(name: str, arguments: Any = None, id: str | None = None) -> Call:
    """arguments: an object, or a text where they are no whole object."""
    return Call(name, {} if arguments is None else arguments, id)


class Case(NamedTuple):
    """An output and what is expected of it."""

    output: str
    expected: list[Item]
    in_reasoning: bool = False
    tools: Mapping[str, Any] = TOOLS


Piece = tuple[int, str]
"""A token and its text."""


@functools.cache
def vocabularies(family: Family) -> dict[str, Vocabulary]:
    """Those of ``KINDS``."""
    marks = list(family.marks.values())
    if family.reasoning is not None:
        marks += [family.reasoning.open, family.reasoning.close]
    ids = {mark: 1000 + number for number, mark in enumerate(dict.fromkeys(marks))}
    extra = {EXTRA_SPECIAL: 999}
    return {
        "text": Vocabulary(extra, frozenset(extra.values())),
        "tokens": Vocabulary(extra | ids, frozenset({999})),
    }


machine_of = functools.cache(build_machine)
"""All machines of a run: their regular expressions take longer to compile than an output to
read, and ``build_machine`` keeps fewer than these tests use."""


def atoms(output: str, vocabulary: Vocabulary) -> list[Piece]:
    """The output as added tokens and single characters."""
    longest = sorted(vocabulary.added, key=len, reverse=True)
    split = re.split("(" + "|".join(map(re.escape, longest)) + ")", output)
    found: list[Piece] = []
    for part in split:
        if part in vocabulary.added:
            found.append((vocabulary.added[part], part))
        else:
            found += [(ord(character) % 900, character) for character in part]
    return found


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Plain neighbours as one piece; added tokens stay alone."""
    result: list[Piece] = []
    for token, piece in pieces:
        if token < 999 and result and result[-1][0] < 999:
            result[-1] = (token, result[-1][1] + piece)
        else:
            result.append((token, piece))
    return result


def cuttings(pieces: list[Piece], thorough: bool) -> Iterator[list[Piece]]:
    """The pieces by characters, by tokens of some sizes, and, if ``thorough``, cut at each place,
    some that are far from each other at once, and at random ones."""
    yield pieces
    whole = joined(pieces)
    for size in (3, 7):
        yield [part for piece in whole for part in _parts(piece, range(size, len(piece[1]), size))]
    if not thorough:
        return
    for number, piece in enumerate(whole):
        places = len(piece[1]) - 1 if piece[0] < 999 else 0
        apart = max(-(-places // MOST_CUTS), min(places, FAR))
        for place in range(1, apart + 1):
            cuts = range(place, places + 1, apart)
            yield [*whole[:number], *_parts(piece, cuts), *whole[number + 1 :]]
    draw = random.Random(len(pieces))
    for _ in range(8):
        share = draw.random()
        yield [
            part
            for piece in whole
            for part in _parts(piece, [n for n in range(1, len(piece[1])) if draw.random() < share])
        ]


def _parts(piece: Piece, cuts: Sequence[int]) -> list[Piece]:
    token, content = piece
    if token >= 999:
        return [piece]
    ends = [*cuts, len(content)]
    return [(token, content[a:b]) for a, b in zip([0, *cuts], ends, strict=True)]


def run(
    family: Family,
    vocabulary: Vocabulary,
    pieces: Sequence[Piece],
    *,
    tools: Mapping[str, Any] = TOOLS,
    parses_tools: bool = True,
    parses_reasoning: bool = True,
    in_reasoning: bool = False,
    complete: bool = False,
    make_id: MakeId = lambda index, name: f"call-{index}-{name}",
    **limits: Any,
) -> list[tuple[Any, ...]]:
    """The events of the pieces, neighbours of one kind joined. complete: the model has ended.
    limits: which calls the parser takes."""
    machine = machine_of(family, vocabulary, tools=parses_tools, reasoning=parses_reasoning)
    parser = OutputParser(
        machine,
        ToolSchemas(tools),
        make_id,
        in_reasoning=in_reasoning,
        **limits,
    )
    contents = [parser.push(token, piece) for token, piece in pieces]
    contents.append(parser.finish(complete=complete))
    return merged(contents)


def merged(contents: Sequence[Content]) -> list[tuple[Any, ...]]:
    """All that came, in a form that does not show how it was cut."""
    found: list[tuple[Any, ...]] = []

    def add(key: tuple[Any, ...], piece: str) -> None:
        if not piece:
            return
        if found and found[-1][:-1] == key:
            found[-1] = (*key, found[-1][-1] + piece)
        else:
            found.append((*key, piece))

    for content in contents:
        for event in [Text(content)] if isinstance(content, str) else content:
            match event:
                case Text():
                    add(("text",), event.text)
                case Reasoning():
                    add(("reasoning",), event.text)
                case ToolArguments():
                    add(("arguments", event.index), event.text)
                case ToolCallOpened():
                    found.append(("call", event.index, event.id, event.name, ""))
    return found


def every_cut(
    family: Family, output: str, *, thorough: Collection[str] = KINDS, **how: Any
) -> dict[str, list[tuple[Any, ...]]]:
    """The events of an output for each vocabulary. They are the same for every cut. thorough: kinds
    of vocabularies with which it is cut at each place."""
    result = {}
    for kind, vocabulary in vocabularies(family).items():
        pieces = atoms(output, vocabulary)
        whole = run(family, vocabulary, joined(pieces), **how)
        for cut in cuttings(pieces, kind in thorough):
            found = run(family, vocabulary, cut, **how)
            assert found == whole, f"{kind}: {cut}"
        result[kind] = whole
    return result


def check(family: Family, case: Case, thorough: Collection[str] = KINDS) -> None:
    """The events of a case are the expected ones, however it is cut, and however tools are
    declared; nothing of a text is lost where nothing is parsed. thorough: see ``every_cut``."""
    found = every_cut(
        family, case.output, thorough=thorough, tools=case.tools, in_reasoning=case.in_reasoning
    )
    for kind, events in found.items():
        assert_events(events, case.expected, f"{kind}: {case.output!r}")
    off: dict[str, Any] = {"parses_tools": False, "thorough": ()}
    every_cut(family, case.output, in_reasoning=case.in_reasoning, **off)
    plain = every_cut(family, case.output, parses_reasoning=False, in_reasoning=True, **off)
    shown = case.output.replace(EXTRA_SPECIAL, "")
    for events in plain.values():
        assert events == ([("text", shown)] if shown else [])


def assert_events(events: list[tuple[Any, ...]], expected: list[Item], what: str) -> None:
    wanted: list[tuple[Any, ...]] = []
    shown: list[tuple[Any, ...]] = []
    calls = [item for item in expected if isinstance(item, Call)]
    number = 0
    for item in expected:
        if isinstance(item, Answer):
            wanted.append((item.kind, item.text))
        else:
            call_id = item.id or f"call-{number}-{item.name}"
            wanted += [
                ("call", number, call_id, item.name, ""),
                ("arguments", number, item.arguments),
            ]
            number += 1
    for event in events:
        if event[0] == "arguments" and not isinstance(calls[event[1]].arguments, str):
            event = (*event[:2], json.loads(event[2]))
        shown.append(event)
    assert shown == wanted, what
