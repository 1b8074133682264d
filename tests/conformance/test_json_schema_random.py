"""Random answers under the masks of random schemas are valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest
from support.conformance.random_schemas import random_schema
from support.conformance.schema_faults import faults
from support.conformance.schema_masks import allowed, compiled, takes, walk

ANSWERS = 3


def walks(seed: int, kind: str) -> Iterator[tuple[dict[str, Any], str]]:
    """A schema and random answers under its mask, if it is accepted."""
    schema = random_schema(seed)
    matcher = compiled(schema, kind)
    if isinstance(matcher, str):
        return
    for number in range(ANSWERS):
        text = walk(matcher, kind, random.Random(f"{seed} {number}"))
        if text is not None:
            yield schema, text


def check(seeds: range, kind: str) -> None:
    answers = 0
    for seed in seeds:
        for schema, text in walks(seed, kind):
            answers += 1
            assert not faults(schema, text), (seed, text)
    assert answers > 0.85 * ANSWERS * len(seeds), "too few schemas were accepted to say anything"


def mutations(value: Any, dice: random.Random) -> Iterator[Any]:
    """Values near ``value``: one part of it left out, repeated, or of another type."""
    strange = [None, True, 0, -1.5, 10**6, "", "zz", "é" * 20, [], {}, [None], {"k": 1}]
    yield from dice.sample(strange, 3)
    if isinstance(value, str):
        yield from (value + "x", value[:-1], value + "\n", value.upper())
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield from (value + 1, -value, value + 0.5, value * 1000)
    elif isinstance(value, list):
        yield [*value, dice.choice(strange)]
        for index, one in enumerate(value):
            yield value[:index] + value[index + 1 :]
            for other in mutations(one, dice):
                yield [*value[:index], other, *value[index + 1 :]]
    elif isinstance(value, dict):
        yield {**value, "zz": dice.choice(strange)}
        for name in value:
            yield {other: inner for other, inner in value.items() if other != name}
            for other in mutations(value[name], dice):
                yield {**value, name: other}


def disguised(schema: dict[str, Any], value: dict[str, Any], dice: random.Random) -> Iterator[str]:
    """The same JSON with a name that the schema lists once more, plain or as ``\\uXXXX``."""
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    yield text.replace(":", ": ").replace(",", " ,")
    for name in schema["properties"]:
        spelled = "".join(f"\\u{ord(character):04x}" for character in name)
        for again in (json.dumps(name, ensure_ascii=False), f'"{spelled}"'):
            strange = dice.choice(["null", "true", "-1.5", '"zz"', "[]", "{}"])
            yield f"{text[:-1]}{',' if value else ''}{again}:{strange}}}"


@pytest.mark.parametrize("kind", ["bytes", "demo"])
def test_random_answers_are_valid(kind: str) -> None:
    check(range(60) if kind == "bytes" else range(60, 75), kind)


def test_changed_answers_pass_only_where_they_are_valid() -> None:
    check_mutations(range(100, 130), 120)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bytes", "demo"])
def test_random_answers_to_a_thousand_schemas_are_valid(kind: str) -> None:
    check(range(1000, 2000), kind)


@pytest.mark.slow
def test_changed_answers_to_a_thousand_schemas_pass_only_where_they_are_valid() -> None:
    check_mutations(range(2000, 3000), 400)


def check_mutations(seeds: range, most: int) -> None:
    tried = refused = 0
    for seed in seeds:
        dice = random.Random(seed)
        for schema, text in walks(seed, "bytes"):
            matcher = compiled(schema)
            assert not isinstance(matcher, str)
            near = list(mutations(json.loads(text), dice))
            texts = [
                json.dumps(value, ensure_ascii=False, separators=(",", ":"))
                for value in dice.sample(near, min(most, len(near)))
            ]
            for changed in (*texts, *disguised(schema, json.loads(text), dice)):
                tried += 1
                if takes(matcher, changed):
                    assert not faults(schema, changed), (seed, changed)
                else:
                    refused += 1
    assert refused > tried / 4 > 100, "too few changes broke an answer to say anything"


def test_a_mask_that_ignores_a_keyword_is_found() -> None:
    """The check itself can fail: with the type left out, invalid answers pass."""
    matcher = compiled({"type": "object", "properties": {"a": {}}, "required": ["a"]})
    assert not isinstance(matcher, str)
    strict = {"properties": {"a": {"type": "integer", "multipleOf": 7}}}
    texts = [walk(matcher, "bytes", random.Random(seed)) for seed in range(20)]
    assert any(text and faults(strict, text) for text in texts)
    assert allowed(matcher)


def test_the_same_seed_makes_the_same_schema() -> None:
    assert random_schema(7) == random_schema(7)
    assert len({json.dumps(random_schema(seed)) for seed in range(50)}) > 45
