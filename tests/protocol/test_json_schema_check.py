"""The check of client schemas ends soon, whatever it is given."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

import pytest

from penstock.protocol.grammar.json_schema.check import refuse
from penstock.protocol.grammar.json_schema.patterns import translate


def nested(levels: int, keyword: str) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(levels):
        schema = {keyword: [schema] if keyword == "anyOf" else schema}
    return schema


def chain(length: int) -> dict[str, Any]:
    """Definitions each of which refers to the next."""
    links = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(length)}
    return {"$ref": "#/$defs/d0", "$defs": {**links, f"d{length}": {"type": "null"}}}


def kinds(count: int) -> dict[str, Any]:
    """A oneOf of as many objects, told apart by a constant."""
    option = [
        {"type": "object", "properties": {"kind": {"const": number}}, "required": ["kind"]}
        for number in range(count)
    ]
    return {"oneOf": option}


HOSTILE: dict[str, Callable[[], Any]] = {
    "deep": lambda: nested(100_000, "items"),
    "deep choices": lambda: nested(100_000, "anyOf"),
    "wide": lambda: {"properties": {f"p{number}": {} for number in range(100_000)}},
    "a long constant": lambda: {"const": list(range(100_000))},
    "one long name above many": lambda: {
        "properties": {"n" * 100_000: {"prefixItems": [{}] * 5000}}
    },
    "many kinds": lambda: kinds(3000),
    "many kinds of many values": lambda: {
        "oneOf": [{"enum": list(range(100 * part, 100 * part + 90))} for part in range(150)]
    },
    "a long chain": lambda: chain(6000),
    "a long reference": lambda: {"$ref": "#" + "/items" * 40_000, "items": {}},
    "a long pattern": lambda: {"pattern": "(a|[b-z]{2})" * 20_000},
    "many brackets": lambda: {"pattern": "(" * 200_000},
    "many broken patterns": lambda: {
        "properties": {str(n): {"pattern": "{" * 9} for n in range(4000)}
    },
    "a long keyword": lambda: {"z" * 200_000: 1},
    "a long number": lambda: {"minimum": 10**4000},
    "many names required": lambda: {"required": [str(number) for number in range(15_000)]},
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_judged_in_a_moment(name: str) -> None:
    schema = HOSTILE[name]()
    start = time.process_time()
    reason = refuse(schema)
    assert time.process_time() - start < 2.0
    assert reason is None or len(reason) < 1000


@pytest.mark.parametrize(
    "value", [None, True, 1, "x", [], {"$defs": 5, "$ref": "#/$defs/a"}, {"properties": {1: {}}}]
)
def test_what_is_no_schema_is_refused(value: Any) -> None:
    assert refuse(value)


@pytest.mark.parametrize("keyword", ["type", "enum", "$ref", "anyOf", "properties", "required"])
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, True, "x", [], [None], [[]], {}, {"a": None}])
def test_a_keyword_with_any_value_is_judged(keyword: str, value: Any) -> None:
    reason = refuse({"items": {keyword: value}})
    assert reason is None or f"items/{keyword}" in reason


def test_a_definition_that_nothing_refers_to_may_hold_anything() -> None:
    assert refuse({"type": "null", "$defs": {"a": {"not": {}}}}) is None
    assert refuse({"$ref": "#/$defs/a", "$defs": {"a": {"not": {}}}}) is not None


def test_a_reason_names_the_place_and_what_to_do() -> None:
    schema = {"properties": {"a/b": {"items": {"minlength": 1}}}}
    assert refuse(schema) == (
        "#/properties/a~1b/items/minlength: unknown keyword 'minlength'; did you mean minLength? "
        "Remove it, or begin its name with x- if it is a note"
    )


def test_many_kinds_of_a_usual_size_are_told_apart() -> None:
    assert refuse(kinds(80)) is None


@pytest.mark.parametrize(
    ("pattern", "translated"),
    [
        ("^a-b$", r"^a\x{2d}b$"),
        (r"\d+\/", r"[0-9]+\x{2f}"),
        ("[[a]", r"[\x{5b}a]"),
        (r"(?<year>\d{4})??", "(?:[0-9]{4})?"),
        (r"\ud83d\ude00\u{1F600}", r"\x{1f600}\x{1f600}"),
        ("[^]", r"[\x{0}-\x{10ffff}]"),
        (r"\p{Lu}", r"\p{Lu}"),
    ],
)
def test_a_pattern_is_written_with_nothing_left_to_interpretation(
    pattern: str, translated: str
) -> None:
    assert translate(pattern) == translated


BROKEN = [
    "*a",
    "a**",
    "a{2,1}",
    "a{,2}",
    "[b-a]",
    "[",
    "[]",
    "(",
    ")",
    "\\",
    r"\q",
    r"\u12",
    "a{x}",
    "]",
]


@pytest.mark.parametrize("pattern", BROKEN)
def test_a_pattern_that_is_no_ecma_script_is_refused(pattern: str) -> None:
    reason = refuse({"pattern": pattern})
    assert reason is not None and reason.startswith("#/pattern: pattern " + repr(pattern))


def test_the_check_takes_json_as_it_is_parsed() -> None:
    assert (
        refuse(json.loads('{"type": "number", "minimum": -1e-7, "maximum": 9007199254740992}'))
        is None
    )
