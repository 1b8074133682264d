from __future__ import annotations

import json
from typing import Any

import pytest

from penstock.services.tokenizer.output.budget import LITERAL, MAX_PARTS, Budget
from penstock.services.tokenizer.output.conversion import convert
from penstock.services.tokenizer.output.tool_schemas import ToolSchemas

STRING, INTEGER, NUMBER = frozenset({"string"}), frozenset({"integer"}), frozenset({"number"})
BOOLEAN, ARRAY, OBJECT = frozenset({"boolean"}), frozenset({"array"}), frozenset({"object"})
NULL, UNKNOWN = frozenset({"null"}), frozenset[str]()


@pytest.mark.parametrize(
    ("text", "kinds", "value"),
    [
        ("7", STRING, "7"),
        ("null", STRING, "null"),
        (' "a" \n', STRING, ' "a" \n'),
        ("7", INTEGER, 7),
        (" +7\n", INTEGER, 7),
        ("-7.0", INTEGER, -7),
        ("007", INTEGER, 7),
        ("9" * 30, INTEGER, 10**30 - 1),
        ("7.5", INTEGER, 7.5),
        ("seven", INTEGER, "seven"),
        ("9" * 5000, INTEGER | STRING, "9" * 5000),
        ("7", NUMBER, 7),
        (".5", NUMBER, 0.5),
        ("1e400", NUMBER, "1e400"),
        ("NaN", NUMBER, "NaN"),
        ("True", BOOLEAN, True),
        ("FALSE", BOOLEAN, False),
        ("yes", BOOLEAN, "yes"),
        ("[1, 2]", ARRAY, [1, 2]),
        ("['a', None, True]", ARRAY, ["a", None, True]),
        ("(1, 2)", ARRAY, [1, 2]),
        ("[" * 100_000, ARRAY, "[" * 100_000),
        ("{1: 2}", OBJECT, "{1: 2}"),
        ("{'a': {'b': 1.5}}", OBJECT, {"a": {"b": 1.5}}),
        ('{"a": 1}', OBJECT, {"a": 1}),
        ("not json", OBJECT, "not json"),
        ("__import__('os')", ARRAY, "__import__('os')"),
        ("None", NULL | STRING, None),
        ("5", INTEGER | STRING, 5),
        ("five", INTEGER | STRING, "five"),
        ("[1]", STRING | INTEGER, "[1]"),
        ('{"a": 1}', OBJECT | STRING, {"a": 1}),
        ("7", UNKNOWN, 7),
        ("1.50", UNKNOWN, 1.5),
        ("007", UNKNOWN, "007"),
        ("true", UNKNOWN, True),
        ("True", UNKNOWN, "True"),
        ("null", UNKNOWN, None),
        ("None", UNKNOWN, "None"),
        ('"quoted"', UNKNOWN, '"quoted"'),
        ('{"a": [1]}', UNKNOWN, {"a": [1]}),
        ("{'a': 1}", UNKNOWN, "{'a': 1}"),
        ("some text", UNKNOWN, "some text"),
        ("", INTEGER, ""),
        ("", UNKNOWN, ""),
    ],
)
def test_a_text_becomes_json_of_its_declared_type_or_a_string(
    text: str, kinds: frozenset[str], value: Any
) -> None:
    found = json.loads(convert(text, kinds, Budget()), parse_constant=pytest.fail)
    assert found == value
    assert type(found) is type(value)


def test_literals_beyond_every_use_are_strings() -> None:
    budget = Budget()
    most = MAX_PARTS // (LITERAL + len("['a']") // LITERAL)
    found = [json.loads(convert("['a']", ARRAY, budget)) for _ in range(most + 1)]
    assert found == [["a"]] * most + ["['a']"]


def test_long_literals_take_more_of_what_an_output_may_have() -> None:
    budget, text = Budget(), "[" + "'a', " * 800 + "]"
    most = MAX_PARTS // (LITERAL + len(text) // LITERAL)
    found = [json.loads(convert(text, ARRAY, budget)) for _ in range(most + 1)]
    assert found == [["a"] * 800] * most + [text]


@pytest.mark.parametrize(
    ("schema", "kinds"),
    [
        ({"type": "string"}, {"string"}),
        ({"type": ["integer", "null"]}, {"integer", "null"}),
        ({"type": "int"}, {"integer"}),
        ({"type": "Dict"}, {"object"}),
        ({"type": "any"}, set()),
        ({"type": "string", "nullable": True}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/n"}]}, {"string", "integer"}),
        ({"allOf": [{"$ref": "#/$defs/n"}]}, {"integer"}),
        ({"$ref": "#/$defs/loop"}, set()),
        ({"$ref": "#/nowhere"}, set()),
        ({"$ref": "http://a/b"}, set()),
        ({"enum": ["a", 1, None]}, {"string", "integer", "null"}),
        ({"const": True}, {"boolean"}),
        ({"properties": {}}, {"object"}),
        ({"items": {}}, {"array"}),
        ({}, set()),
        (True, set()),
        ({"type": 5}, set()),
    ],
)
def test_the_types_of_a_parameter_are_what_its_schema_says(schema: Any, kinds: set[str]) -> None:
    tool = {
        "properties": {"p": schema},
        "$defs": {"n": {"type": "integer"}, "loop": {"$ref": "#/$defs/loop"}},
    }
    assert ToolSchemas({"f": tool}).of("f").kinds("p") == kinds


def test_parameters_that_are_not_declared_have_the_type_of_additional_ones() -> None:
    tools = ToolSchemas({"f": {"additionalProperties": {"type": "string"}}, "g": None, "h": True})
    assert tools.of("f").kinds("x") == {"string"}
    assert tools.of("g").kinds("x") == tools.of("h").kinds("x") == frozenset()
    assert tools.of("unheard").kinds("x") == frozenset()
