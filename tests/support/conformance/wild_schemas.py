"""Schemas of keywords thrown together, as no client writes them, and all the small values.

Names and values are few, so that keywords meet: bounds with bounds, ``allOf`` with properties,
patterns with names, in every order.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import product
from typing import Any

Schema = dict[str, Any]

NAMES = ("a", "b", "ab")
SIMPLE = (None, True, False, 0, 1, 2, 3, -1, 1.5, 0.5, 10, "", "a", "b", "ab", "aa", "a\n")
TYPES: tuple[Any, ...] = (
    *("object", "string", "integer", "number", "array", ["object", "array"]),
    *(["string", "null"], ["integer", "string"], ["number", "object"]),
)
MAX_LEVELS = 3


def wild_schema(seed: int) -> Schema:
    """Any keywords, nested; two definitions to refer to."""
    dice = random.Random(f"wild {seed}")
    return {**_schema(dice, 0), "$defs": {"x": _schema(dice, 1), "y": _schema(dice, 2)}}


def _schema(dice: random.Random, level: int) -> Schema:
    known = list(_SIMPLE_KEYWORDS.items())
    if level < MAX_LEVELS:
        known += _NESTED_KEYWORDS.items()
    chosen = dice.sample(known, dice.choice((1, 2, 2, 3, 4)))
    pairs: list[tuple[str, Any]] = [(name, make(dice, level + 1)) for name, make in chosen]
    if dice.random() < 0.5:
        pairs.append(("type", dice.choice(TYPES)))
    dice.shuffle(pairs)
    return dict(pairs)


def _inner(dice: random.Random, level: int) -> Schema | bool:
    return _schema(dice, level) if dice.random() < 0.85 else dice.choice((True, False, {}))


def _some(dice: random.Random, level: int, most: int) -> list[Any]:
    return [_inner(dice, level) for _ in range(dice.randrange(1, most + 1))]


def _value(dice: random.Random, level: int) -> Any:
    return dice.choice((*SIMPLE, [1], {"a": 1}, [], {}))


def _named(*names: str) -> Callable[[random.Random, int], Schema]:
    def make(dice: random.Random, level: int) -> Schema:
        chosen = dice.sample(names, dice.randrange(1, 3))
        return {name: _inner(dice, level) for name in chosen}

    return make


def _one(*values: Any) -> Callable[[random.Random, int], Any]:
    return lambda dice, level: dice.choice(values)


Make = Callable[[random.Random, int], Any]
_SIMPLE_KEYWORDS: dict[str, Make] = {
    "$ref": _one("#", "#/$defs/x", "#/$defs/y"),
    "const": _value,
    "enum": lambda dice, level: [_value(dice, level) for _ in range(dice.randrange(1, 4))],
    "required": lambda dice, level: dice.sample(NAMES, dice.randrange(1, 3)),
    "minProperties": _one(0, 1, 2),
    "maxProperties": _one(0, 1, 2),
    "minItems": _one(0, 1, 2),
    "maxItems": _one(0, 1, 2),
    "minLength": _one(0, 1, 2),
    "maxLength": _one(0, 1, 2),
    "pattern": _one("^a", "b$", "^a$", "^.$", "a|b", "^$", r"\d", "^[^a]"),
    "format": _one("date", "time", "hostname"),
    "minimum": _one(0, 1, -1, 0.5, 1.5),
    "maximum": _one(0, 1, 2, 1.5),
    "exclusiveMinimum": _one(0, 1, -1, 0.5),
    "exclusiveMaximum": _one(0, 1, 2, 1.5),
    "multipleOf": _one(1, 2, 3, 0.5, 1.5),
}
_NESTED_KEYWORDS: dict[str, Make] = {
    "allOf": lambda dice, level: _some(dice, level, 2),
    "anyOf": lambda dice, level: _some(dice, level, 3),
    "oneOf": lambda dice, level: _some(dice, level, 2),
    "properties": _named(*NAMES),
    "patternProperties": _named("^a$", "b", "^a", "^[a-b]$", "c"),
    "additionalProperties": _inner,
    "items": _inner,
    "prefixItems": lambda dice, level: _some(dice, level, 2),
}


def small_values() -> list[str]:
    """JSON texts: simple values, short arrays, objects of the names above in both orders."""
    some = (None, 0, 1, 1.5, "a", "ab", True, [], {})
    few = (None, 0, 1, "a", "ab", [], {"a": 1})
    values: list[Any] = [*SIMPLE, [], {}, [[1]], [[[]]], [{"a": 1}], {"a": 1, "b": 1, "ab": 1}]
    values += [{"a": {"a": 1}}, {"a": {"a": {"a": 1}}}, {"a": {"b": "a"}}, {"a": [1]}]
    for one in some:
        values += [[one], [one, 1], [1, one], ["a", one, one], *({name: one} for name in NAMES)]
    for first, second in product(few, repeat=2):
        for one, other in (("a", "b"), ("b", "a"), ("a", "ab"), ("ab", "a")):
            values.append({one: first, other: second})
    texts = [json.dumps(one, ensure_ascii=False, separators=(",", ":")) for one in values]
    return [
        *texts,
        *('{"a":1,"a":"x"}', '{"b":1,"b":null}', '{"c":2}', '{"c":"x","c":2}', '{"a":1,"c":2}'),
        *('{"\\u0061":"x"}', '{"\\u0061":1,"b":1}', '{"ab":1,"ab":"x"}', '"\\u0061"'),
        *("1.0", "-0", "-0.0", "1e0", "2.50", "0.50", '"2024-02-29"', '"2023-02-29"'),
    ]
