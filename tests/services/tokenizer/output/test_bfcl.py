"""Every call of the Berkeley Function Calling Leaderboard's data, in every wire form.

``make bfcl`` fetches the data (the wheel of bfcl-eval); ``BFCL_WHEEL`` names another place. Without
it the tests are skipped. What is written is the first right answer to each question, with the types
of its parameters; what comes back must be equal.
"""

from __future__ import annotations

import json
import os
import random
import zipfile
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support.tokenizer.output.replay import atoms, joined, run, vocabularies
from support.tokenizer.output.wire_forms import FORMS, Call, Types
from test_output_odd_calls import calls_of

from penstock.services.tokenizer.output.families import FAMILIES

ROOT = Path(__file__).parents[4]
CATEGORIES = [
    "simple_python", "multiple", "parallel", "parallel_multiple",
    "live_simple", "live_multiple", "live_parallel", "live_parallel_multiple",
]  # fmt: skip
WITHOUT_TYPES = ("XML parameters", "XML pairs", "XML invoke", "channels, Muse")
JSON_TYPES = {"dict": "object", "float": "number", "tuple": "array", "any": ""}


def _wheel() -> Path | None:
    named = os.environ.get("BFCL_WHEEL")
    found = [Path(named)] if named else sorted((ROOT / "build" / "bfcl").glob("bfcl_eval-*.whl"))
    return found[-1] if found and found[-1].is_file() else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(_wheel() is None, reason="no BFCL data: make bfcl fetches it"),
]


class Question(NamedTuple):
    id: str
    tools: dict[str, Any]
    calls: list[Call]

    @property
    def types(self) -> Types:
        return {
            name: {key: one.get("type", "") for key, one in schema.get("properties", {}).items()}
            for name, schema in self.tools.items()
        }


@cache
def questions() -> list[Question]:
    wheel = _wheel()
    assert wheel is not None
    found = []
    with zipfile.ZipFile(wheel) as archive:
        for category in CATEGORIES:
            name = f"BFCL_v4_{category}.json"
            asked = {one["id"]: one for one in _lines(archive, f"bfcl_eval/data/{name}")}
            for answer in _lines(archive, f"bfcl_eval/data/possible_answer/{name}"):
                declared = asked[answer["id"]]["function"]
                tools = {one["name"]: _json_schema(one["parameters"]) for one in declared}
                calls = [
                    (tool, _arguments(values, tools.get(tool, {})))
                    for one in answer["ground_truth"]
                    for tool, values in one.items()
                ]
                found.append(Question(answer["id"], tools, calls))
    return found


def _lines(archive: zipfile.ZipFile, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in archive.read(name).decode().splitlines() if line]


def _json_schema(schema: Any) -> Any:
    """A schema with JSON schema's names of types."""
    if isinstance(schema, list):
        return [_json_schema(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _json_schema(one) for key, one in schema.items()}
    if isinstance(result.get("type"), str):
        result["type"] = JSON_TYPES.get(result["type"], result["type"])
    return result


def _arguments(values: dict[str, list[Any]], schema: dict[str, Any]) -> dict[str, Any]:
    """A right value of each parameter: the first of its type, if there is one. An empty text
    means that it may be left out."""
    required, properties = schema.get("required", []), schema.get("properties", {})
    arguments = {}
    for key, right in values.items():
        given = [one for one in right if one != ""] or (right if key in required else [])
        if given:
            is_text = properties.get(key, {}).get("type") == "string"
            typed = [one for one in given if isinstance(one, str) == is_text]
            arguments[key] = _first((typed or given)[0])
    return arguments


def _first(value: Any) -> Any:
    """Within objects every value is again a list of right ones."""
    if isinstance(value, list):
        return [_first(one) for one in value]
    if isinstance(value, dict):
        return {
            key: _first(one[0]) if isinstance(one, list) and one else one
            for key, one in value.items()
        }
    return value


@pytest.mark.parametrize("name", FORMS)
def test_every_call_comes_back_equal(name: str) -> None:
    form = FORMS[name]
    family = FAMILIES[form.family]
    vocabulary = vocabularies(family)["tokens"]
    draw = random.Random(name)
    total, equal, not_carried, wrong = 0, 0, 0, []
    for question in questions():
        types = question.types
        calls = [call for call in question.calls if not form.lacks(call, types)]
        total += len(question.calls)
        not_carried += len(question.calls) - len(calls)
        if not calls:
            continue
        pieces = atoms(form.write(calls), vocabulary)
        cut = [piece for run_ in _runs(pieces, draw) for piece in joined(run_)]
        found = calls_of(run(family, vocabulary, cut, tools=question.tools))
        equal += sum(one == other for one, other in zip(found, calls, strict=False))
        if found != calls:
            wrong.append((question.id, calls, found))
    print(f"{name}: {equal} of {total} calls equal, {not_carried} that it cannot carry")
    assert wrong == []
    assert equal == total - not_carried
    # Some answers hold null where a text is declared, which text in a tag cannot say.
    assert not_carried <= (total // 25 if name in WITHOUT_TYPES else 0)


def _runs(pieces: list[tuple[int, str]], draw: random.Random) -> list[list[tuple[int, str]]]:
    """The pieces in runs of 1 to 8."""
    runs, place = [], 0
    while place < len(pieces):
        size = draw.randint(1, 8)
        runs.append(pieces[place : place + size])
        place += size
    return runs


def test_all_questions_are_read() -> None:
    assert len(questions()) > 2300
    assert sum(len(question.calls) for question in questions()) > 3100
