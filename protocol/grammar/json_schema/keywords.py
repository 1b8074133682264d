"""The keywords of JSON Schema: which are enforced, which say nothing, which are refused.

Drafts 6, 7, 2019-09 and 2020-12. Every keyword is in exactly one of the three tables; one that is
in none is refused too, because a misspelt keyword would otherwise be ignored.
"""

from __future__ import annotations

from difflib import get_close_matches
from enum import Enum, auto
from typing import Any


class SchemaRefused(ValueError):
    """A schema that cannot be enforced; the message says what, where, and what to do."""


class Kind(Enum):
    """The shape of a keyword's value."""

    SCHEMA = auto()
    SCHEMAS = auto()
    NAMED_SCHEMAS = auto()
    ITEMS = auto()
    COUNT = auto()
    LEAST_COUNT = auto()
    NUMBER = auto()
    STRING = auto()
    STRINGS = auto()
    TYPE = auto()
    VALUE = auto()
    VALUES = auto()


ENFORCED: dict[str, Kind] = {
    "type": Kind.TYPE,
    "const": Kind.VALUE,
    "enum": Kind.VALUES,
    "$ref": Kind.STRING,
    "allOf": Kind.SCHEMAS,
    "anyOf": Kind.SCHEMAS,
    "oneOf": Kind.SCHEMAS,
    "properties": Kind.NAMED_SCHEMAS,
    "patternProperties": Kind.NAMED_SCHEMAS,
    "additionalProperties": Kind.SCHEMA,
    "required": Kind.STRINGS,
    "minProperties": Kind.LEAST_COUNT,
    "maxProperties": Kind.COUNT,
    "items": Kind.ITEMS,
    "prefixItems": Kind.SCHEMAS,
    "additionalItems": Kind.SCHEMA,
    "minItems": Kind.LEAST_COUNT,
    "maxItems": Kind.COUNT,
    "minLength": Kind.LEAST_COUNT,
    "maxLength": Kind.COUNT,
    "pattern": Kind.STRING,
    "format": Kind.STRING,
    "minimum": Kind.NUMBER,
    "maximum": Kind.NUMBER,
    "exclusiveMinimum": Kind.NUMBER,
    "exclusiveMaximum": Kind.NUMBER,
    "multipleOf": Kind.NUMBER,
}

IN_PLACE = ("allOf", "anyOf", "oneOf", "$ref")
"""Keywords whose schemas hold for the same value as the schema that they stand in."""

ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions", "deprecated"),
        *("description", "discriminator", "example", "examples", "readOnly", "title", "writeOnly"),
    }
)
"""They say nothing about what is valid. Names that begin with ``x-`` count too."""

REFUSED: dict[str, str] = {
    "not": "say what is allowed instead",
    "if": "use anyOf with one schema for each case",
    "then": "use anyOf with one schema for each case",
    "else": "use anyOf with one schema for each case",
    "contains": "use prefixItems for items that must be there",
    "minContains": "use prefixItems for items that must be there",
    "maxContains": "use maxItems",
    "uniqueItems": "remove it and drop repeated items yourself",
    "dependencies": "use anyOf with one schema for each case",
    "dependentRequired": "use anyOf with one schema for each case",
    "dependentSchemas": "use anyOf with one schema for each case",
    "propertyNames": 'use patternProperties and "additionalProperties": false',
    "unevaluatedItems": 'use prefixItems and "items": false',
    "unevaluatedProperties": 'list all properties and use "additionalProperties": false',
    "contentEncoding": "use pattern for the text; the decoded content is not checked",
    "contentMediaType": "remove it; the content of a string is not checked",
    "contentSchema": "describe the value itself, not a string that holds it",
    "$dynamicRef": "use $ref",
    "$dynamicAnchor": "use $defs and $ref",
    "$recursiveRef": "use $ref",
    "$recursiveAnchor": "use $ref",
    "$vocabulary": "remove it",
    "id": "use $id, at the root only",
    "nullable": 'use "type": [..., "null"]',
    "x-guidance": "remove it; the server sets how a grammar is compiled",
}

ASKS_FOR_NOTHING: dict[str, Any] = {"uniqueItems": False, "nullable": False}
"""Refused keywords with the one value that asks for nothing and is left out."""

DRAFTS = {
    "https://json-schema.org/draft/2020-12/schema": 2020,
    "https://json-schema.org/draft/2019-09/schema": 2019,
    "http://json-schema.org/draft-07/schema": 7,
    "http://json-schema.org/draft-06/schema": 6,
}


def asks_for_nothing(keyword: str, value: object) -> bool:
    """Is it one of the refused keywords with a value that changes nothing?"""
    return keyword in ASKS_FOR_NOTHING and value is ASKS_FOR_NOTHING[keyword]


def draft_of(schema: dict[str, Any]) -> int:
    """The draft that a whole schema is written for; 2020-12 where it does not say."""
    named = schema.get("$schema", "https://json-schema.org/draft/2020-12/schema")
    draft = DRAFTS.get(named.removesuffix("#")) if isinstance(named, str) else None
    if draft is None:
        raise SchemaRefused(
            f"$schema {shown(named)} is not known: use one of {', '.join(DRAFTS)}, or leave it out"
        )
    return draft


def check_keyword(keyword: str, value: object, where: str) -> None:
    """Refuse a keyword that is not enforced. ``where`` is its pointer."""
    if keyword in ENFORCED or keyword in ANNOTATIONS or asks_for_nothing(keyword, value):
        return
    if keyword in REFUSED:
        raise SchemaRefused(f"{where}: {keyword} is not enforced; {REFUSED[keyword]}")
    if keyword.startswith("x-"):
        return
    close = get_close_matches(keyword[:64], ENFORCED, n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise SchemaRefused(
        f"{where}: unknown keyword {shown(keyword)}; {hint}"
        "Remove it, or begin its name with x- if it is a note"
    )


def shown(value: object) -> str:
    """A client's value, short enough for a message."""
    if isinstance(value, int) and abs(value) > 10**30:
        return "a number of more than 30 digits"
    text = repr(value) if isinstance(value, str | int | float | None) else type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."
