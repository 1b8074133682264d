"""Every feature of JSON Schema is enforced, or refused with a message that names the keyword."""

from __future__ import annotations

import json
from typing import Any

import pytest
from support.conformance.schema_faults import faults
from support.conformance.schema_masks import compiled, compiled_raw, takes, tokenizer

from penstock.protocol.grammar.compiler import compile_grammar
from penstock.protocol.grammar.json_schema.check import exact, refuse
from penstock.protocol.grammar.request import Grammar

DEFS = {"word": {"type": "string", "maxLength": 3}}
CAT = {
    "type": "object",
    "properties": {"kind": {"const": "cat"}, "lives": {"type": "integer"}},
    "required": ["kind"],
    "additionalProperties": False,
}
DOG = {
    **CAT,
    "properties": {"kind": {"const": "dog"}, "since": {"type": "string", "format": "date"}},
}
TREE = {
    "type": "object",
    "properties": {"left": {"$ref": "#/$defs/tree"}, "leaf": {"type": "null"}},
    "additionalProperties": False,
}

ENFORCED: dict[str, tuple[dict[str, Any], list[str], list[str]]] = {
    "nothing": ({}, ["1", '"a"', "[{}]", '{"a":{"b":[1e5]}}'], ["", "tru", "{a:1}", "[1,]", "01"]),
    "type": ({"type": "boolean"}, ["true"], ["1", "null"]),
    "types": ({"type": ["integer", "null"]}, ["1", "null"], ["1.5", '"a"']),
    "white space": ({"type": "array"}, ["[1, 2]", "[\n  1\n]"], ["[1,   2]", "[\n\n1]"]),
    "const": (
        {"const": {"a": [1, None]}},
        ['{"a":[1,null]}'],
        ['{"a":[1]}', '{"a":[1,null],"b":1}'],
    ),
    "enum": ({"enum": ["a", 2, 'q"']}, ['"a"', "2", '"q\\""'], ['"b"', "3", '"2"']),
    "enum with a type": ({"type": "string", "enum": ["a", 2]}, ['"a"'], ["2"]),
    "integer bounds": (
        {"type": "integer", "minimum": -3, "exclusiveMaximum": 12},
        ["-3", "0", "11"],
        ["-4", "12", "1.5", "1e1", "007"],
    ),
    "number bounds": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 2.5},
        ["0.001", "1", "2.5"],
        ["0", "-1", "2.51", "2.5e1", "3"],
    ),
    "an exclusive bound before a fraction": (
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        ["0.1", "0.5", "0.000000000000001"],
        ["0", "0.0", "-0.1", "0.51"],
    ),
    "the same, merged": (
        {"type": "number", "allOf": [{"exclusiveMaximum": -1}, {"minimum": -1.5}]},
        ["-1.5", "-1.1", "-1.00000000000001"],
        ["-1", "-1.0", "-1.6"],
    ),
    "multipleOf": ({"type": "number", "multipleOf": 0.25}, ["1.75", "-3", "0"], ["0.3", "1.1"]),
    "merged multiples": (
        {"type": "integer", "allOf": [{"multipleOf": 4}, {"multipleOf": 6}]},
        ["12", "-24", "0"],
        ["4", "6", "14"],
    ),
    "a count with a fraction of zero": ({"type": "array", "maxItems": 1.0}, ["[1]"], ["[1,2]"]),
    "length": (
        {"type": "string", "minLength": 1, "maxLength": 2},
        ['"a"', '"😀😀"', '"\\n\\""'],
        ['""', '"abc"', '"\\u0061"'],
    ),
    "pattern": ({"type": "string", "pattern": "b+$"}, ['"ab"', '"bbb"'], ['"ba"', '"b\\n"']),
    "pattern's dot": ({"pattern": "^.$"}, ['"a"', '"é"', "1"], ['"\\r"', '"\u2028"', '"ab"']),
    "pattern's classes": (
        {"type": "string", "pattern": r"^[[a]\d\S$"},
        ['"[1é"', '"a2x"'],
        ['"a٣x"', '"a1\u00a0"', '"a1\ufeff"'],
    ),
    "pattern's alternatives": ({"type": "string", "pattern": "^a|b$"}, ['"ax"', '"xb"'], ['"xa"']),
    "date": (
        {"type": "string", "format": "date"},
        ['"2024-02-29"', '"1999-12-31"', '"2000-02-29"'],
        ['"2023-02-29"', '"1900-02-29"', '"2024-04-31"', '"0000-01-01"', '"x2024-01-01"'],
    ),
    "date-time": (
        {"type": "string", "format": "date-time"},
        ['"2024-02-29T23:59:59.5Z"', '"2024-01-01T00:00:00+01:00"'],
        ['"2023-02-29T00:00:00Z"', '"2024-01-01T00:00:60Z"', '"2024-01-01 00:00:00Z"'],
    ),
    "time": ({"format": "time"}, ['"12:00:00Z"', "5"], ['"24:00:00Z"', '"23:59:60Z"', '"12:00"']),
    "format and pattern": (
        {"type": "string", "format": "date", "pattern": "^2024"},
        ['"2024-02-29"'],
        ['"2023-01-01"', '"2024"'],
    ),
    "hostname": (
        {"type": "string", "format": "hostname"},
        ['"a-b.example"'],
        ['"-a"', '"a_b"', '"xn--a"', json.dumps(".".join(["a" * 60] * 5))],
    ),
    "uuid": (
        {"type": "string", "format": "uuid"},
        ['"123e4567-e89b-12d3-a456-426614174000"'],
        ['"123e4567e89b12d3a456426614174000"'],
    ),
    "ipv4": ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"'], ['"256.0.0.1"', '"1.2.3"']),
    "ipv6": ({"type": "string", "format": "ipv6"}, ['"::1"', '"1::2:3"'], ['"1:2"', '"12345::"']),
    "email": ({"type": "string", "format": "email"}, ['"a.b@c.de"'], ['"a"', '"a@"', '"a@b@c"']),
    "uri": (
        {"type": "string", "format": "uri"},
        ['"https://a.b/c?d#e"'],
        ['"a b"', '"//a"', '"a"'],
    ),
    "duration": ({"type": "string", "format": "duration"}, ['"P1DT2H"', '"P3W"'], ['"P"', '"1D"']),
    "properties": (
        {"properties": {"a": {"type": "integer"}, "b": {"type": "null"}}, "required": ["a"]},
        ['{"a":1}', '{"a":1,"b":null}', '{"a":1,"c":[]}', "7"],
        ['{"a":"1"}', '{"b":null}', '{"a":1,"b":2}', '{"a":1,"a":"x"}', '{"\\u0061":"x"}'],
    ),
    "a name in disguise": (
        {"type": "object", "properties": {"ab": {"type": "integer"}}},
        ['{"ab":1,"abc":"x"}', '{"é":1}'],
        ['{"\\u0061b":"x"}', '{"a\\u0062":"x"}', '{"ab":1,"\\u0061\\u0062":"x"}'],
    ),
    "names with signs": (
        {"properties": {'q"\\/\n': {"const": 1}, "é": {"const": 2}}, "additionalProperties": False},
        ['{"q\\"\\\\/\\n":1,"é":2}', "{}"],
        ['{"q\\"\\\\/\\n":2}', '{"\\u00e9":2}', '{"é":1}'],
    ),
    "properties with the names of keywords": (
        {
            "type": "object",
            "properties": {"id": {"type": "integer"}, "$id": {"type": "null"}, "not": {}},
            "required": ["id", "$id"],
            "additionalProperties": False,
            "$defs": {"unused": {"properties": {"id": {}}, "id": "x"}},
        },
        ['{"id":1,"$id":null}', '{"id":1,"$id":null,"not":[]}'],
        ['{"id":"x","$id":null}', '{"$id":null}', '{"id":1}'],
    ),
    "additionalProperties": (
        {"type": "object", "properties": {"a": {}}, "additionalProperties": {"type": "integer"}},
        ['{"a":"x","b":1}', '{"b":1}'],
        ['{"b":"x"}', '{"a":1,"b":null}'],
    ),
    "patternProperties": (
        {
            "type": "object",
            "properties": {"ab": {"maximum": 5}},
            "patternProperties": {"^a": {"type": "integer"}},
            "additionalProperties": False,
        },
        ['{"ab":5,"ac":9}', "{}"],
        ['{"ab":6}', '{"ab":"x"}', '{"ac":"x"}', '{"b":1}', '{"\\u0061c":"x"}'],
    ),
    "minProperties": (
        {"type": "object", "minProperties": 1},
        ['{"a":1}', '{"a":1,"b":2}'],
        ["{}"],
    ),
    "maxProperties": ({"type": "object", "maxProperties": 1}, ["{}", '{"a":1}'], ['{"a":1,"b":2}']),
    "items": (
        {"items": {"type": "integer"}, "minItems": 1},
        ["[1]", "[1,2]", "{}"],
        ["[]", '["a"]'],
    ),
    "prefixItems": (
        {"prefixItems": [{"type": "integer"}, {"type": "null"}], "items": False},
        ["[]", "[1]", "[1,null]"],
        ["[null]", "[1,null,1]"],
    ),
    "a list of items in draft 7": (
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "integer"}],
            "additionalItems": {"type": "null"},
        },
        ["[1]", "[1,null]"],
        ['["a"]', "[1,1]"],
    ),
    "anyOf": (
        {"anyOf": [{"type": "integer"}, {"maxLength": 1, "type": "string"}]},
        ["1", '"a"'],
        ['"ab"'],
    ),
    "anyOf beside others": (
        {"type": "integer", "minimum": 5, "anyOf": [{"maximum": 6}, {"multipleOf": 10}]},
        ["5", "6", "20"],
        ["4", "7", "0"],
    ),
    "allOf": (
        {
            "allOf": [
                {"properties": {"a": {"minimum": 2}}},
                {"properties": {"a": {"type": "integer"}}},
            ]
        },
        ['{"a":2}', "1"],
        ['{"a":1}', '{"a":2.5}'],
    ),
    "oneOf of kinds": (
        {"oneOf": [{"$ref": "#/$defs/cat"}, DOG], "$defs": {"cat": CAT}},
        ['{"kind":"cat","lives":9}', '{"kind":"dog","since":"2024-02-29"}'],
        ['{"kind":"cow"}', '{"kind":"dog","lives":9}', '{"kind":"dog","since":"2023-02-29"}'],
    ),
    "oneOf of types": ({"oneOf": [{"type": "null"}, {"type": "integer"}]}, ["null", "1"], ["1.5"]),
    "oneOf beside anyOf": (
        {
            "anyOf": [{"maximum": 9}, {"type": "string"}],
            "oneOf": [{"type": "integer"}, {"const": "a"}],
        },
        ["9", '"a"'],
        ["10", '"b"', "1.5"],
    ),
    "$ref": ({"$ref": "#/$defs/word", "$defs": DEFS}, ['"abc"'], ['"abcd"', "1"]),
    "$ref beside others": (
        {"$ref": "#/$defs/word", "minLength": 2, "$defs": DEFS},
        ['"ab"'],
        ['"a"', '"abcd"', "1"],
    ),
    "$ref with an escaped name": (
        {"$ref": "#/$defs/a~1b%25", "$defs": {"a/b%": {"type": "null"}, "a~1b%25": {}}},
        ["null"],
        ["1"],
    ),
    "$ref to itself": (
        {"$ref": "#/$defs/tree", "$defs": {"tree": TREE}},
        ["{}", '{"left":{"left":{"leaf":null}}}'],
        ['{"left":null}', '{"right":{}}'],
    ),
    "a recursive value that can end": (
        {
            "type": "object",
            "properties": {"a": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
            "required": ["a"],
            "additionalProperties": False,
        },
        ['{"a":null}', '{"a":{"a":null}}'],
        ["{}", '{"a":{}}'],
    ),
    "a name that an unused definition has, too": (
        {
            "$id": "http://x/",
            "$ref": "#/$defs/b",
            "$defs": {
                "a": {"$id": "http://x/", "$defs": {"b": {"type": "string"}}},
                "b": {"type": "integer"},
            },
        },
        ["1"],
        ['"a"'],
    ),
    "notes": (
        {
            "type": "null",
            "title": "t",
            "default": 5,
            "examples": [1],
            "x-order": 3,
            "deprecated": True,
        },
        ["null"],
        ["5"],
    ),
    "what asks for nothing": ({"type": "array", "uniqueItems": False}, ["[1,1]"], ["1"]),
}

REFUSED: dict[str, tuple[Any, str]] = {
    "true": (True, "JSON object"),
    "a list": ([], "JSON object"),
    "an unknown type": ({"type": "strin"}, "#/type"),
    "a misspelt keyword": ({"items": {"minlength": 3}}, "did you mean minLength"),
    "x-guidance": ({"x-guidance": {"lenient": True}}, "x-guidance"),
    "an unknown draft": ({"$schema": "http://json-schema.org/draft-04/schema#"}, "$schema"),
    "$schema inside": (
        {"items": {"$schema": "https://json-schema.org/draft/2020-12/schema"}},
        "$schema",
    ),
    "$id inside": ({"properties": {"a": {"$id": "b"}}}, "#/properties/a/$id"),
    "a $ref through an $id": (
        {
            "$ref": "#/$defs/a/properties/c",
            "$defs": {
                "a": {"$id": "http://y/", "properties": {"c": {"$ref": "#/$defs/b"}}},
                "b": {"type": "integer"},
            },
        },
        "$id",
    ),
    "not": ({"not": {}}, "not is not enforced"),
    "if": ({"if": {}, "then": False}, "if is not enforced"),
    "uniqueItems": ({"uniqueItems": True}, "uniqueItems"),
    "contains": ({"contains": {}}, "contains"),
    "dependentRequired": ({"dependentRequired": {"a": ["b"]}}, "dependentRequired"),
    "dependentSchemas": ({"dependentSchemas": {}}, "dependentSchemas"),
    "dependencies": ({"dependencies": {}}, "dependencies"),
    "propertyNames": ({"propertyNames": {}}, "propertyNames"),
    "unevaluatedProperties": ({"unevaluatedProperties": False}, "unevaluatedProperties"),
    "unevaluatedItems": ({"unevaluatedItems": False}, "unevaluatedItems"),
    "contentEncoding": ({"contentEncoding": "base64"}, "contentEncoding"),
    "nullable": ({"type": "string", "nullable": True}, "nullable"),
    "$dynamicRef": ({"$dynamicRef": "#a"}, "$dynamicRef"),
    "a $ref elsewhere": ({"$ref": "https://example.com/a"}, "$ref"),
    "a $ref to an anchor": ({"$ref": "#a", "$defs": {"b": {"$anchor": "a"}}}, "$ref"),
    "a $ref to nothing": ({"$ref": "#/$defs/a"}, "$ref"),
    "a $ref to a value": ({"$ref": "#/default", "default": {}}, "$ref"),
    "a $ref to itself alone": ({"$ref": "#"}, "refers to itself"),
    "a loop of references": (
        {"anyOf": [{"$ref": "#/$defs/a"}], "$defs": {"a": {"allOf": [{"$ref": "#"}]}}},
        "refers to itself",
    ),
    "a value that requires itself": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        "requires itself",
    ),
    "items that require themselves": (
        {
            "anyOf": [{"type": "null"}, {"$ref": "#/$defs/a"}],
            "$defs": {
                "a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1},
            },
        },
        "requires itself",
    ),
    "an unknown format": ({"type": "string", "format": "regex"}, "format"),
    "a format of numbers": ({"type": "integer", "format": "int32"}, "format"),
    "oneOf that overlaps": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "oneOf of equal constants": ({"oneOf": [{"const": 1}, {"enum": [1.0, 2]}]}, "oneOf"),
    "oneOf of optional kinds": (
        {"oneOf": [{"type": "object", "properties": {"a": {"const": one}}} for one in "xy"]},
        "oneOf",
    ),
    "minProperties above one": ({"minProperties": 2}, "minProperties"),
    "a large bound": ({"maximum": 2**53 + 1}, "maximum"),
    "an endless bound": ({"minimum": 10**400}, "minimum"),
    "a bound of 17 digits": ({"exclusiveMinimum": -0.38312435350161245}, "exclusiveMinimum"),
    "a large constant": ({"const": [9007199254740993]}, "const"),
    "a bound of draft 4": ({"minimum": 1, "exclusiveMinimum": True}, "exclusiveMinimum"),
    "multipleOf zero": ({"multipleOf": 0}, "multipleOf"),
    "multipleOf with odd digits": ({"multipleOf": 0.07}, "multipleOf"),
    "multiples that overflow": ({"allOf": [{"multipleOf": 100_000}] * 2}, "multipleOf"),
    "a list of items": ({"items": [{}]}, "prefixItems"),
    "prefixItems in draft 7": (
        {"$schema": "http://json-schema.org/draft-07/schema", "prefixItems": [{}]},
        "prefixItems",
    ),
    "additionalItems beside allOf": (
        {
            "$schema": "http://json-schema.org/draft-07/schema",
            "additionalItems": False,
            "allOf": [True],
            "items": [{}],
        },
        "additionalItems",
    ),
    "an empty enum": ({"enum": []}, "enum"),
    "a negative length": ({"minLength": -1}, "minLength"),
    "a pattern that looks ahead": ({"pattern": "(?!a)"}, "looks ahead"),
    "a pattern with \\b": ({"pattern": r"\ba"}, "word boundaries"),
    "a pattern with a back reference": ({"pattern": r"(a)\1"}, "pattern"),
    "a pattern that is broken": ({"pattern": "a)("}, "pattern"),
    "a pattern with a control character": ({"pattern": "^\x00$"}, "control character"),
    "a constant with a control character": ({"const": "a\x00b"}, "control character"),
    "half of a surrogate pair": ({"const": "\ud800"}, "surrogate"),
    "a schema that is no schema": ({"properties": {"a": 5}}, "#/properties"),
    "a pattern as a name": ({"patternProperties": {"(?=a)": {}}}, "patternProperties"),
}


@pytest.mark.parametrize("feature", ENFORCED)
def test_an_accepted_feature_lets_valid_answers_through_and_no_other(feature: str) -> None:
    schema, good, bad = ENFORCED[feature]
    matcher = compiled(schema)
    assert not isinstance(matcher, str), matcher
    for text in good:
        assert not faults(schema, text), f"{text} is no valid example"
        assert takes(matcher, text), text
    for text in bad:
        assert not takes(matcher, text), text


@pytest.mark.parametrize("feature", REFUSED)
def test_a_feature_that_is_not_enforced_is_refused_by_name(feature: str) -> None:
    schema, named = REFUSED[feature]
    reason = refuse(schema)
    assert reason is not None
    assert named in reason
    assert len(reason) < 600


@pytest.mark.parametrize(
    ("schema", "invalid"),
    [
        ({"type": "string", "format": "date"}, '"2023-02-29"'),
        ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, "0"),
        ({"type": "integer", "format": "int32"}, "9999999999"),
        ({"minProperties": 2, "type": "object"}, '{"a":1,"a":2}'),
        ({"const": 9007199254740993}, "9007199254740992"),
        ({"const": "a\x00b"}, '"ab"'),
    ],
)
def test_what_is_refused_or_rewritten_would_have_been_wrong(schema: Any, invalid: str) -> None:
    """Once the compiler enforces one of these, its check can go."""
    matcher = compiled_raw(schema)
    assert not isinstance(matcher, str)
    assert takes(matcher, invalid)


def test_a_name_in_disguise_passes_where_unicode_escapes_are_allowed() -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    matcher = compiled_raw(schema, json_allowed_escapes='nrbtf\\"u')
    assert not isinstance(matcher, str)
    assert takes(matcher, '{"\\u0061":"x"}')


def test_the_server_compiles_what_is_exact() -> None:
    schema = {"type": "object", "properties": {"a": {"format": "date", "type": "string"}}}
    grammar = Grammar("json_schema", json.dumps(schema))
    matcher = compile_grammar(grammar, tokenizer("bytes"))
    assert takes(matcher, '{"a": "2024-02-29", "b": 1}')
    assert not takes(matcher, '{"a": "2023-02-29"}')
    assert not takes(matcher, '{"\\u0061": 5}')


def test_exact_leaves_the_schema_as_it_is() -> None:
    schema = {"properties": {"a": {"format": "date"}}, "oneOf": [{"pattern": "."}], "$id": "x"}
    before = json.dumps(schema)
    assert exact(schema) != schema
    assert json.dumps(schema) == before
