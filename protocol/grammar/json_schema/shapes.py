"""What type of value each keyword takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.protocol.grammar.json_schema.keywords import Kind, SchemaRefused, shown

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
MAX_COUNT = 2**31 - 1
MAX_LEAST_COUNT = 2**20
"""No answer is longer."""


def check_shape(kind: Kind, value: object, where: str) -> None:
    """Refuse a keyword's value of the wrong type. ``where`` is the keyword's pointer."""
    fits, wanted = _SHAPES[kind]
    if not fits(value):
        raise SchemaRefused(f"{where} must be {wanted}, not {shown(value)}")


def _schema(value: Any) -> bool:
    return isinstance(value, dict | bool)


def _schemas(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(map(_schema, value))


def _named_schemas(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_schema, value.values()))


def _items(value: Any) -> bool:
    return _schema(value) or (isinstance(value, list) and all(map(_schema, value)))


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _count(value: Any) -> bool:
    return _number(value) and 0 <= value <= MAX_COUNT and value == int(value)


def _least_count(value: Any) -> bool:
    return _count(value) and value <= MAX_LEAST_COUNT


def _string(value: Any) -> bool:
    return isinstance(value, str)


def _strings(value: Any) -> bool:
    return isinstance(value, list) and all(map(_string, value))


def _type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def _values(value: Any) -> bool:
    return isinstance(value, list) and bool(value)


_SHAPES: dict[Kind, tuple[Callable[[Any], bool], str]] = {
    Kind.SCHEMA: (_schema, "a schema"),
    Kind.SCHEMAS: (_schemas, "a list of schemas that is not empty"),
    Kind.NAMED_SCHEMAS: (_named_schemas, "an object of schemas"),
    Kind.ITEMS: (_items, "a schema"),
    Kind.COUNT: (_count, f"a whole number from 0 to {MAX_COUNT}"),
    Kind.LEAST_COUNT: (_least_count, f"a whole number from 0 to {MAX_LEAST_COUNT}"),
    Kind.NUMBER: (_number, "a number"),
    Kind.STRING: (_string, "a string"),
    Kind.STRINGS: (_strings, "a list of strings"),
    Kind.TYPE: (_type, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    Kind.VALUE: (lambda value: True, "a value"),
    Kind.VALUES: (_values, "a list of values that is not empty"),
}
