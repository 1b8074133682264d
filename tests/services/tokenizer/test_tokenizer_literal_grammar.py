"""Calls whose arguments are literals, Python's or with their own quotes, keep to their schemas."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from support.tokenizer.output.replay import Case, call, check
from support.tokenizer.output.written import written
from test_tokenizer_tool_grammar import Follower

from penstock.services.tokenizer.output.families import FAMILIES
from penstock.services.tokenizer.prompt_error import PromptError

pytest.importorskip("llguidance")
PYTHON = ["python_calls", "python_calls_lines", "python_calls_lfm2"]
QUOTED = ["own_quoting_functiongemma", "own_quoting_gemma4"]
AS_TOKENS = pytest.mark.parametrize("as_tokens", [True, False], ids=["tokens", "text"])
SCHEMA: dict[str, Any] = {
    "properties": {
        "text": {"type": "string"},
        "count": {"type": ["integer", "null"]},
        "ratio": {"type": "number"},
        "loud": {"type": "boolean"},
        "kind": {"enum": ["a", "b c", 3, None]},
        "tags": {"type": "array", "items": {"type": "string"}},
        "where": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x"],
        },
        "tree": {"$ref": "#/$defs/tree"},
        "any": {},
    },
    "required": ["text"],
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"leaf": {"type": "string"}, "next": {"$ref": "#/$defs/tree"}},
        }
    },
}
LEGAL: list[dict[str, Any]] = [
    {"text": ""},
    {"text": "Zürich, (a=1) [x] {y}: é😀 </s>"},
    {"text": "x", "count": None, "ratio": -2.5e3, "loud": False},
    {"text": "x", "ratio": 7},
    {"text": "x", "kind": "b c", "tags": [], "where": {"x": -1}},
    {"text": "x", "kind": 3, "tags": ["a", "b"], "where": {"x": 1, "y": 2}},
    {"text": "x", "tree": {"leaf": "l", "next": {"next": {"leaf": "m"}}}},
    {"text": "x", "any": [1, {"k": [True, None, "s"]}, []]},
    {"text": "x", "any": {}},
]
BROKEN: list[dict[str, Any]] = [
    {},
    {"count": 1},
    {"text": 1},
    {"text": "x", "count": 1.5},
    {"text": "x", "count": "1"},
    {"text": "x", "ratio": True},
    {"text": "x", "loud": 1},
    {"text": "x", "kind": "c"},
    {"text": "x", "tags": [1]},
    {"text": "x", "where": {"y": 2}},
    {"text": "x", "where": {"x": 1, "z": 2}},
    {"text": "x", "tree": {"next": []}},
    {"text": "x", "unknown": 1},
    {"count": 1, "text": "x"},
]


def tool(schema: dict[str, Any], name: str = "do") -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": schema}}


def follower(name: str, as_tokens: bool, schema: dict[str, Any], **output: Any) -> Follower:
    tools = msgspec.json.encode([tool(schema)])
    return Follower(FAMILIES[name], as_tokens, tools=tools, **output)


@AS_TOKENS
@pytest.mark.parametrize("name", PYTHON + QUOTED)
def test_arguments_that_keep_to_the_schema_are_taken_and_others_are_not(
    name: str, as_tokens: bool
) -> None:
    following = follower(name, as_tokens, SCHEMA)
    for arguments in LEGAL:
        assert following.takes(written(FAMILIES[name], [("do", arguments)])), arguments
    for arguments in BROKEN:
        assert not following.takes(written(FAMILIES[name], [("do", arguments)])), arguments


@pytest.mark.parametrize("name", PYTHON + QUOTED)
def test_what_is_taken_is_read_as_what_was_meant(name: str) -> None:
    family = FAMILIES[name]
    tools = {"do": {"type": "object", **SCHEMA}}
    for arguments in LEGAL:
        output = written(family, [("do", arguments), ("do", arguments)])
        check(family, Case(output, [call("do", arguments)] * 2, tools=tools))


TEXTS = [
    ("text='it\\'s'", True),
    ('text="it\'s"', True),
    (r"text='\n\t\u00e9\\'", True),
    ('text="x",count=1', True),
    ("text='x', loud=True", True),
    ("text='x', loud=true", True),
    ("text='x', count=null", True),
    ("text='x', where={\"x\":1}", True),
    ("text='it's'", False),
    ("text='two\nlines'", False),
    (r"text='\ud800'", False),
    ("text=x", False),
    ("text=f'x'", False),
    ("text='x',", False),
    ("text='x' count=1", False),
    ("text='x', count=01", False),
    ("text='x', where={x: 1}", False),
    ("text='x', tags=('a', 'b')", False),
    ("'x'", False),
]


def test_python_is_taken_as_far_as_it_is_read_without_doubt() -> None:
    following = follower("python_calls", True, SCHEMA)
    for arguments, is_legal in TEXTS:
        assert following.takes(f"[do({arguments})]") is is_legal, arguments


@pytest.mark.parametrize("name", PYTHON + QUOTED)
def test_a_strict_tool_whose_schema_says_more_than_a_shape_is_refused_by_name(name: str) -> None:
    schema = {"properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"]}
    family = FAMILIES[name]
    with pytest.raises(PromptError, match=r"'do', which is strict: minimum cannot be enforced"):
        follower(name, True, schema, strict=["do"])
    following = follower(name, True, schema)
    assert following.takes(written(family, [("do", {"n": 0})]))
    assert not following.takes(written(family, [("do", {"n": "x"})]))
    plain = {"properties": {"n": {"type": "integer"}}, "required": ["n"]}
    assert follower(name, True, plain, strict=["do"]).grammar is not None


def test_a_tool_without_parameters_takes_none_and_one_without_a_schema_any() -> None:
    none = follower("python_calls", True, {"properties": {}, "additionalProperties": False})
    assert none.takes("[do()]")
    assert not none.takes("[do(a=1)]")
    free = follower("python_calls", True, {"type": "object"})
    assert free.takes("[do()]")
    assert free.takes("[do(a=1, b_2=['x', {'k': {}}])]")
    assert not free.takes("[do(a)]")
