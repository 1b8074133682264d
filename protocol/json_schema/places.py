"""All schemas inside a schema that hold for some value: found without recursion, and bounded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import unquote

from penstock.protocol.json_schema.keywords import (
    ENFORCED,
    IN_PLACE,
    Kind,
    SchemaRefused,
    at,
    shown,
)

MAX_DEPTH = 64
"""Levels of JSON nesting; llguidance parses 128 and recurses over them."""
MAX_VALUES = 20_000
"""JSON values in a schema, keys included."""

Schema = dict[str, Any] | bool


@dataclass
class Place:
    """One schema, and where it stands. ``in_place`` are the pointers of those that hold with it."""

    pointer: str
    schema: Schema
    in_place: list[str] = field(default_factory=list)

    def at(self, keyword: str | int) -> str:
        return at(self.pointer, keyword)


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


def places(root: dict[str, Any]) -> dict[str, Place]:
    """Every schema that can hold for a value, by its pointer: the root (``""``) first.

    Definitions that nothing refers to are not among them. Raises ``SchemaRefused`` for a ``$ref``
    that leads nowhere; values of the wrong shape are passed by, they are for others to refuse.
    """
    found: dict[str, Place] = {}
    waiting: list[tuple[str, object]] = [("", root)]
    while waiting:
        pointer, schema = waiting.pop()
        if pointer in found or not isinstance(schema, dict | bool):
            continue
        place = found[pointer] = Place(pointer, schema)
        if isinstance(schema, bool):
            continue
        for keyword, inner_pointer, inner in _inside(pointer, schema):
            waiting.append((inner_pointer, inner))
            if keyword in IN_PLACE:
                place.in_place.append(inner_pointer)
        reference = schema.get("$ref")
        if isinstance(reference, str):
            target_pointer, target = resolve(root, reference, place.at("$ref"))
            waiting.append((target_pointer, target))
            place.in_place.append(target_pointer)
    return found


def _inside(pointer: str, schema: dict[str, Any]) -> Iterator[tuple[str, str, object]]:
    """(keyword, pointer, schema) of the schemas directly inside one."""
    for keyword, value in schema.items():
        kind = ENFORCED.get(keyword)
        below = f"{pointer}/{keyword}"
        if kind is Kind.NAMED_SCHEMAS and isinstance(value, dict):
            for name, inner in value.items():
                yield keyword, f"{below}/{name.replace('~', '~0').replace('/', '~1')}", inner
        elif kind in (Kind.SCHEMAS, Kind.ITEMS) and isinstance(value, list):
            for index, inner in enumerate(value):
                yield keyword, f"{below}/{index}", inner
        elif kind in (Kind.SCHEMA, Kind.ITEMS):
            yield keyword, below, value


def resolve(root: dict[str, Any], reference: str, where: str) -> tuple[str, Schema]:
    """The pointer and the schema that ``$ref`` names: ``#`` or ``#/`` and the way to a schema.

    ``where`` is for messages. The way must lead through keywords that hold schemas, so that what
    it ends at is a schema and not, say, a default value.
    """
    if reference == "#":
        return "", root
    if not reference.startswith("#/"):
        raise SchemaRefused(
            f"{where}: $ref {shown(reference)} is not followed; refer to a schema in the same "
            "document, as in #/$defs/NAME"
        )
    names = [_unescaped(name) for name in reference[2:].split("/")]
    schema: object = root
    steps = iter(names)
    for keyword in steps:
        inner = schema.get(keyword) if isinstance(schema, dict) else None
        kind = _kind_on_the_way(keyword)
        if kind is Kind.NAMED_SCHEMAS and isinstance(inner, dict):
            inner = inner.get(next(steps, ""))
        elif isinstance(inner, list) and kind in (Kind.SCHEMAS, Kind.ITEMS):
            inner = _item(inner, next(steps, ""))
        elif kind not in (Kind.SCHEMA, Kind.ITEMS):
            inner = None
        schema = inner
        if not isinstance(schema, dict | bool):
            raise SchemaRefused(
                f"{where}: $ref {shown(reference)} does not lead to a schema; "
                "put the schema into $defs"
            )
    canonical = "".join("/" + name.replace("~", "~0").replace("/", "~1") for name in names)
    assert isinstance(schema, dict | bool)
    return canonical, schema


def _kind_on_the_way(keyword: str) -> Kind | None:
    if keyword in ("$defs", "definitions"):
        return Kind.NAMED_SCHEMAS
    # A oneOf is put to the compiler as something else: nothing may point into it.
    return None if keyword == "oneOf" else ENFORCED.get(keyword)


def _item(values: list[Any], index: str) -> object:
    plain = index.isascii() and index.isdigit() and (index == "0" or not index.startswith("0"))
    return values[int(index)] if plain and len(index) < 7 and int(index) < len(values) else None


def _unescaped(name: str) -> str:
    return unquote(name).replace("~1", "/").replace("~0", "~")
