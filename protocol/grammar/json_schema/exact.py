"""A schema in words that the compiler enforces to the letter, with the same meaning."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from penstock.protocol.grammar.json_schema.formats import OWN
from penstock.protocol.grammar.json_schema.keywords import (
    ENFORCED,
    IN_PLACE,
    Kind,
    SchemaRefused,
    asks_for_nothing,
    shown,
)
from penstock.protocol.grammar.json_schema.numbers import close, leaking_bounds
from penstock.protocol.grammar.json_schema.patterns import translate
from penstock.protocol.grammar.json_schema.places import Place, check_size, places
from penstock.protocol.grammar.json_schema.shapes import check_shape

_NAMES = ("$id", "id", "$schema", "$anchor", "$dynamicAnchor", "$recursiveAnchor")


def exact(schema: object) -> dict[str, Any]:
    """What to compile for ``schema``, which ``refuse`` has let through. ``schema`` stays as it is.

    Patterns are in the compiler's syntax, ``oneOf`` is ``anyOf`` (no two hold at once), formats
    that it gets wrong are patterns, and an exclusive bound that leaks is the next number. An answer
    may be narrower than the schema, never wider. Raises ``SchemaRefused`` for what is no schema.
    """
    check_size(schema)
    root = deepcopy(schema)
    if not isinstance(root, dict):
        raise SchemaRefused(f"the schema must be a JSON object, not {shown(root)}")
    found = places(root)
    for place in found:
        for keyword, value in place.schema.items():
            if keyword in ENFORCED:
                check_shape(ENFORCED[keyword], value, place.at(keyword))
    together = any(merges(place.schema) for place in found)
    for bound in leaking_bounds([found] if together else [[place] for place in found]):
        close(bound)
    _forget_names(found)
    for place in found:
        _rewrite(place.schema)
    return root


def _forget_names(found: list[Place]) -> None:
    """Take the names of definitions that nothing refers to: two with one name confuse the compiler.

    The schemas in use lose theirs when they are rewritten.
    """
    used = {id(place.schema) for place in found}
    waiting: list[Any] = []
    for place in found:
        for keyword in ("$defs", "definitions"):
            named = place.schema.get(keyword)
            waiting.extend(named.values() if isinstance(named, dict) else ())
    while waiting:
        value = waiting.pop()
        if id(value) in used:
            continue
        if isinstance(value, dict):
            for name in _NAMES:
                value.pop(name, None)
        if isinstance(value, dict | list):
            waiting.extend(value.values() if isinstance(value, dict) else value)


def merges(schema: dict[str, Any]) -> bool:
    """Does a schema make the compiler merge two? Several that hold for one value, that is."""
    parts = len(schema.get("allOf", ()))
    parts += sum(keyword in schema for keyword in ("anyOf", "oneOf", "$ref"))
    others = any(
        keyword in ENFORCED and keyword not in IN_PLACE
        for keyword, value in schema.items()
        if not asks_for_nothing(keyword, value)
    )
    overlaps = "patternProperties" in schema and "properties" in schema
    return parts + others > 1 or overlaps


def _rewrite(schema: dict[str, Any]) -> None:
    before = dict(schema)
    more: list[Any] = []
    schema.clear()
    for keyword, value in before.items():
        if asks_for_nothing(keyword, value) or keyword in ("$id", "$anchor"):
            continue
        if ENFORCED.get(keyword) in (Kind.COUNT, Kind.LEAST_COUNT):
            value = int(value)  # 2.0 is a whole number, too.
        elif keyword == "pattern":
            value = translate(value)
        elif keyword == "patternProperties":
            value = {translate(name): inner for name, inner in value.items()}
        elif keyword == "format" and value in OWN:
            more.append(OWN[value])
            continue
        elif keyword == "oneOf":
            more.append({"anyOf": value})
            continue
        schema[keyword] = value
    _add(schema, more)


def _add(schema: dict[str, Any], more: list[Any]) -> None:
    """Put schemas that must hold too beside the keywords of ``schema``, or into ``allOf``.

    What is inside them stays the same objects: those are rewritten after this.
    """
    for part in more:
        if part.keys() & schema.keys():
            schema["allOf"] = [*schema.get("allOf", ()), dict(part)]
        else:
            schema.update(part)
