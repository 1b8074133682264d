"""All schemas inside a schema that hold for some value: found without recursion, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from penstock.protocol.grammar.json_schema.keywords import (
    ENFORCED,
    IN_PLACE,
    Kind,
    SchemaRefused,
    shown,
)

MAX_DEPTH = 64
"""Levels of JSON nesting; llguidance parses 128 and recurses over them."""
MAX_VALUES = 20_000
"""JSON values in a schema, keys included."""

Schema = dict[str, Any] | bool


@dataclass(eq=False)
class Place:
    """One schema, and where it stands."""

    schema: dict[str, Any]
    above: Place | None = None
    steps: tuple[str | int, ...] = ()
    """Keys and indices from the schema above, or from the root, to this one."""
    in_place: list[Place] = field(default_factory=list)
    """Schemas for the same value: those of allOf, anyOf, oneOf and $ref."""

    def at(self, *steps: str | int) -> str:
        """The JSON pointer of something in this schema, long names cut short."""
        names = [_step(step) for step in steps]
        place: Place | None = self
        while place is not None:
            names += [_step(step) for step in reversed(place.steps)]
            place = place.above
        return "/".join(["#", *reversed(names)])


def _step(step: str | int) -> str:
    name = str(step) if len(str(step)) <= 48 else f"{str(step)[:45]}..."
    return name.replace("~", "~0").replace("/", "~1")


def check_size(root: object) -> None:
    """Refuse what is too deep or too large to look through, and text that is not Unicode."""
    waiting: list[tuple[object, int]] = [(root, 1)]
    count = 0
    while waiting:
        value, depth = waiting.pop()
        count += 1
        if depth > MAX_DEPTH:
            raise SchemaRefused(f"the schema is nested deeper than {MAX_DEPTH} levels; use $defs")
        if isinstance(value, dict):
            for name in value:
                _check_text(name)
            count += len(value)
            waiting.extend((inner, depth + 1) for inner in value.values())
        elif isinstance(value, list):
            waiting.extend((inner, depth + 1) for inner in value)
        elif isinstance(value, str):
            _check_text(value)
        if count + len(waiting) > MAX_VALUES:
            raise SchemaRefused(f"the schema has more than {MAX_VALUES} values; ask for less")


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise SchemaRefused(f"the schema has a key that is not text: {shown(text)}")
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise SchemaRefused(f"{ascii(text)[:80]} has half of a surrogate pair; remove it")


def places(root: dict[str, Any]) -> list[Place]:
    """Every schema that can hold for a value, ``true`` and ``false`` aside: the root first.

    Definitions that nothing refers to are not among them. Raises ``SchemaRefused`` for a ``$ref``
    that leads nowhere; values of the wrong shape are passed by, they are for others to refuse.
    """
    found = {id(root): Place(root)}
    waiting = list(found.values())

    def meet(schema: object, above: Place | None, steps: tuple[str | int, ...]) -> Place | None:
        if not isinstance(schema, dict):
            return None
        if id(schema) not in found:
            found[id(schema)] = Place(schema, above, steps)
            waiting.append(found[id(schema)])
        return found[id(schema)]

    while waiting:
        place = waiting.pop()
        for steps, schema in _inside(place.schema):
            inner = meet(schema, place, steps)
            if inner and steps[0] in IN_PLACE:
                place.in_place.append(inner)
        reference = place.schema.get("$ref")
        if isinstance(reference, str):
            names, schema = resolve(root, reference, place.at("$ref"))
            target = meet(schema, None, tuple(names))
            if target:
                place.in_place.append(target)
    return list(found.values())


def _inside(schema: dict[str, Any]) -> Iterator[tuple[tuple[str | int, ...], object]]:
    """The schemas directly inside one, each with the way to it."""
    for keyword, value in schema.items():
        kind = ENFORCED.get(keyword)
        if kind is Kind.NAMED_SCHEMAS and isinstance(value, dict):
            yield from (((keyword, name), inner) for name, inner in value.items())
        elif kind in (Kind.SCHEMAS, Kind.ITEMS) and isinstance(value, list):
            yield from (((keyword, index), inner) for index, inner in enumerate(value))
        elif kind in (Kind.SCHEMA, Kind.ITEMS):
            yield (keyword,), value


def resolve(root: dict[str, Any], reference: str, where: str) -> tuple[list[str], Schema]:
    """The way and the schema that ``$ref`` names: ``#`` or ``#/`` and the way to a schema.

    ``where`` is for messages. The way must lead through keywords that hold schemas, so that what
    it ends at is a schema and not, say, a default value.
    """
    if reference == "#":
        return [], root
    if not reference.startswith("#/"):
        raise SchemaRefused(
            f"{where}: $ref {shown(reference)} is not followed; refer to a schema in the same "
            "document, as in #/$defs/NAME"
        )
    names = [_unescaped(name) for name in reference[2:].split("/")]
    schema: Schema = root
    steps = iter(names)
    for keyword in steps:
        if schema is not root and isinstance(schema, dict) and "$id" in schema:
            raise SchemaRefused(
                f"{where}: $ref {shown(reference)} leads through a schema with an $id; remove it"
            )
        inner = schema.get(keyword) if isinstance(schema, dict) else None
        kind = _kind_on_the_way(keyword)
        if kind is Kind.NAMED_SCHEMAS and isinstance(inner, dict):
            inner = inner.get(next(steps, ""))
        elif isinstance(inner, list) and kind in (Kind.SCHEMAS, Kind.ITEMS):
            inner = _item(inner, next(steps, ""))
        elif kind not in (Kind.SCHEMA, Kind.ITEMS):
            inner = None
        if not isinstance(inner, dict | bool):
            raise SchemaRefused(
                f"{where}: $ref {shown(reference)} does not lead to a schema; "
                "put the schema into $defs"
            )
        schema = inner
    return names, schema


def _kind_on_the_way(keyword: str) -> Kind | None:
    if keyword in ("$defs", "definitions"):
        return Kind.NAMED_SCHEMAS
    # The compiler gets these as something else: nothing may point into them.
    return None if keyword in ("oneOf", "patternProperties") else ENFORCED.get(keyword)


def _item(values: list[Any], index: str) -> object:
    plain = index.isascii() and index.isdigit() and (index == "0" or not index.startswith("0"))
    return values[int(index)] if plain and len(index) < 7 and int(index) < len(values) else None


def _unescaped(name: str) -> str:
    return unquote(name).replace("~1", "/").replace("~0", "~")
