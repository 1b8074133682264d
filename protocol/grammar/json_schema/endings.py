"""Whether a value of a schema can ever end: one that requires another of its kind cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.protocol.grammar.json_schema.keywords import SchemaRefused
from penstock.protocol.grammar.json_schema.places import Place
from penstock.protocol.grammar.json_schema.shapes import TYPES

MAX_ROUNDS = 64
"""Definitions that refer to each other in so long a chain, against the order, are let through."""
Ends = Callable[[object], bool]
SIMPLE = TYPES - {"array", "object"}


def check_endings(found: list[Place]) -> None:
    """Refuse schemas that no finite value is valid for: a required child of the same kind, say.

    ``found`` is what ``places`` gives. Each round adds the schemas that have a finite value, given
    those known to have one; what is inside comes first, so most documents take two rounds.
    """
    by_schema = {id(place.schema): place for place in found}
    ending: set[Place] = set()

    def ends(schema: object) -> bool:
        return isinstance(schema, bool) or by_schema.get(id(schema)) in ending

    for _ in range(MAX_ROUNDS):
        before = len(ending)
        for place in reversed(found):
            if place not in ending and _ends(place, ends, ending):
                ending.add(place)
        if len(ending) == before:
            break
    else:
        return
    for place in found:
        if place not in ending:
            raise SchemaRefused(
                f"{place.at()}: no value of this schema ever ends, since it requires itself; leave "
                "a property out of required, or offer null with anyOf"
            )


def _ends(place: Place, ends: Ends, ending: set[Place]) -> bool:
    schema = place.schema
    if "const" in schema or "enum" in schema:
        return True
    for keyword in ("anyOf", "oneOf"):
        if keyword in schema and not any(map(ends, schema[keyword])):
            return False
    choices = {id(one) for keyword in ("anyOf", "oneOf") for one in schema.get(keyword, ())}
    if any(inner not in ending for inner in place.in_place if id(inner.schema) not in choices):
        return False
    named = schema.get("type", SIMPLE)
    types = {named} if isinstance(named, str) else set(named)
    if types & SIMPLE:
        return True
    return ("object" in types and _object_ends(schema, ends)) or (
        "array" in types and _array_ends(schema, ends)
    )


def _object_ends(schema: dict[str, Any], ends: Ends) -> bool:
    properties = schema.get("properties", {})
    return all(ends(properties[name]) for name in schema.get("required", ()) if name in properties)


def _array_ends(schema: dict[str, Any], ends: Ends) -> bool:
    least = int(schema.get("minItems", 0))
    items = schema.get("items", True)
    first = schema.get("prefixItems", items if isinstance(items, list) else [])
    if not all(map(ends, first[:least])):
        return False
    return least <= len(first) or isinstance(items, list) or ends(items)
