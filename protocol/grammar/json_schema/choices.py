"""Which schemas of a ``oneOf`` can never hold for the same value.

``oneOf`` asks for exactly one. Where no two can hold together it means the same as ``anyOf``, and
that is what the compiler gets.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from penstock.protocol.grammar.json_schema.keywords import SchemaRefused
from penstock.protocol.grammar.json_schema.places import Schema
from penstock.protocol.grammar.json_schema.shapes import TYPES

MAX_LEVELS = 6
"""How deep properties of two objects are compared."""
MAX_COMPARISONS = 20_000

Resolve = Callable[[str], Schema]
"""Finds the schema that the text of a ``$ref`` names."""


class Choices:
    """Compares schemas of one document; its patience ends after so many comparisons."""

    def __init__(self, resolve: Resolve) -> None:
        self._resolve = resolve
        self._left = MAX_COMPARISONS
        self._known: dict[int, tuple[set[str] | None, set[str]]] = {}

    def check(self, options: list[Schema], where: str) -> None:
        """Refuse options two of which may hold for the same value. ``where`` is their pointer."""
        for second in range(len(options)):
            for first in range(second):
                if not self.disjoint(options[first], options[second]):
                    raise SchemaRefused(
                        f"{where}: schemas {first} and {second} of oneOf may both "
                        "hold for one value, which is not enforced; use anyOf, or give each a "
                        'different type or a required property with a different "const"'
                    )

    def disjoint(self, first: Schema, second: Schema, levels: int = MAX_LEVELS) -> bool:
        """Is it certain that no value is valid for both?"""
        self._left -= 1
        if self._left < 0 or levels < 0:
            return False
        if first is False or second is False:
            return True
        ours, theirs = self._all_of(first), self._all_of(second)
        if any(self._plainly(one, other, levels) for one in ours for other in theirs):
            return True
        return self._split(ours, second, levels) or self._split(theirs, first, levels)

    def _split(self, parts: list[dict[str, Any]], other: Schema, levels: int) -> bool:
        """Is every way through one of the choices of ``parts`` disjoint from ``other``?"""
        for part in parts:
            for keyword in ("anyOf", "oneOf"):
                options = part.get(keyword)
                if options and all(self.disjoint(one, other, levels - 1) for one in options):
                    return True
        return False

    def _all_of(self, schema: Schema) -> list[dict[str, Any]]:
        """The schemas that all hold where this one does, references followed."""
        parts: list[dict[str, Any]] = []
        waiting = [schema]
        while waiting and len(parts) < 16:
            part = waiting.pop()
            if isinstance(part, bool) or any(part is known for known in parts):
                continue
            parts.append(part)
            waiting.extend(part.get("allOf", ()))
            if "$ref" in part:
                waiting.append(self._resolve(part["$ref"]))
        return parts

    def _plainly(self, one: dict[str, Any], other: dict[str, Any], levels: int) -> bool:
        """Does a type, a constant or a required property keep the two apart?"""
        values, types = self._facts(one)
        others, other_types = self._facts(other)
        if values is not None and others is not None:
            return not values & others
        if not types & other_types and not _numbers(types, other_types):
            return True
        if types != {"object"} or other_types != {"object"}:
            return False
        if values is not None or others is not None:
            return False
        properties, other_properties = one.get("properties", {}), other.get("properties", {})
        return any(
            self.disjoint(properties[name], other_properties[name], levels - 1)
            for name in {*one.get("required", ()), *other.get("required", ())}
            if name in properties and name in other_properties
        )

    def _facts(self, schema: dict[str, Any]) -> tuple[set[str] | None, set[str]]:
        """The constants and types that a schema allows."""
        if id(schema) not in self._known:
            self._known[id(schema)] = _values(schema), _types(schema)
        return self._known[id(schema)]


def _numbers(types: set[str], others: set[str]) -> bool:
    """Every integer is a number."""
    return ("integer" in types and "number" in others) or (
        "number" in types and "integer" in others
    )


def _values(schema: dict[str, Any]) -> set[str] | None:
    """The constants that a schema allows, each spelled the same way whenever it is equal."""
    if "const" in schema:
        return {_spelled(schema["const"])}
    if "enum" in schema:
        return {_spelled(value) for value in schema["enum"]}
    return None


def _spelled(value: Any) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, dict):
            return {name: plain(inner) for name, inner in value.items()}
        return [plain(inner) for inner in value] if isinstance(value, list) else value

    return json.dumps(plain(value), sort_keys=True)


def _types(schema: dict[str, Any]) -> set[str]:
    """The types that a schema allows; those of its constants, if it has any."""
    named = schema.get("type")
    types = {named} if isinstance(named, str) else set(named or TYPES)
    if "const" in schema:
        return types & _types_of(schema["const"])
    if "enum" in schema:
        return types & set().union(*(_types_of(value) for value in schema["enum"]))
    return types


def _types_of(value: Any) -> set[str]:
    if value is None:
        return {"null"}
    if isinstance(value, bool):
        return {"boolean"}
    if isinstance(value, int | float):
        return {"integer", "number"} if value == int(value) else {"number"}
    if isinstance(value, str):
        return {"string"}
    return {"array" if isinstance(value, list) else "object"}
