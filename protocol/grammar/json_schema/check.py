"""Is a client's JSON Schema enforced? ``refuse`` says why not; ``exact`` is what to compile.

llguidance 1.9.1 ignores some of what a schema may say, and enforces some of it wrongly; the rest
that it does not know it refuses in its own words. So a schema passes here first. What ``refuse``
lets through is enforced if the compiler gets ``exact`` of it, with ``OPTIONS``: every answer that
ends is valid. Found by JSON-Schema-Test-Suite and random walks (``tests/conformance``).
"""

from __future__ import annotations

from penstock.protocol.grammar.json_schema.choices import Choices
from penstock.protocol.grammar.json_schema.endings import check_endings
from penstock.protocol.grammar.json_schema.exact import exact, merges
from penstock.protocol.grammar.json_schema.formats import FORMATS
from penstock.protocol.grammar.json_schema.keywords import (
    ENFORCED,
    IN_PLACE,
    SchemaRefused,
    check_keyword,
    draft_of,
    shown,
)
from penstock.protocol.grammar.json_schema.numbers import (
    check_exact,
    check_multiples,
    check_numbers,
)
from penstock.protocol.grammar.json_schema.patterns import translate, unspelled
from penstock.protocol.grammar.json_schema.places import Place, check_size, places, resolve
from penstock.protocol.grammar.json_schema.shapes import check_shape

OPTIONS: dict[str, str | bool | None] = {
    "item_separator": ",",
    "key_separator": ":",
    "whitespace_flexible": True,
    "whitespace_pattern": None,
    "coerce_one_of": False,
    "lenient": False,
    "json_allowed_escapes": 'nrbtf\\"',
    "json_allow_general_unicode_escapes": False,
}
"""How llguidance must compile (its ``overrides``), for what is said here to be true.

With ``\\uXXXX`` allowed, a name such as ``"\\u0061"`` passes as another than ``"a"``, and its value
as an additional property. The space between tokens may be another.
"""


def refuse(schema: object) -> str | None:
    """Why ``schema`` (parsed JSON) cannot be enforced, or None.

    The reason names the keyword, its JSON pointer and what to do. Takes time in proportion to the
    schema's size, which is bounded, and never recurses over it.
    """
    try:
        _check(schema)
    except SchemaRefused as error:
        return str(error)
    return None


def _check(root: object) -> None:
    if not isinstance(root, dict):
        raise SchemaRefused(f"the schema must be a JSON object, not {shown(root)}")
    check_size(root)
    draft = draft_of(root)
    found = places(root)
    for place in found:
        _check_place(place, draft)
    _check_loops(found)
    check_endings(found)
    choices = Choices(lambda reference: resolve(root, reference, "#")[1])
    for place in found:
        if "oneOf" in place.schema:
            choices.check(place.schema["oneOf"], place.at("oneOf"))
    if any(merges(place.schema) for place in found):
        check_multiples(found)


def _check_place(place: Place, draft: int) -> None:
    schema = place.schema
    for keyword, value in schema.items():
        check_keyword(keyword, value, place.at(keyword))
        if keyword in ENFORCED:
            check_shape(ENFORCED[keyword], value, place.at(keyword))
    if (place.above or place.steps) and (named := {"$schema", "$id"} & schema.keys()):
        name = min(named)
        raise SchemaRefused(f"{place.at(name)}: {name} may stand at the root only; remove it")
    check_numbers(place)
    _check_arrays(place, draft)
    _check_objects(place)
    if "format" in schema and schema["format"] not in FORMATS:
        raise SchemaRefused(
            f"{place.at('format')}: format {shown(schema['format'])} is not enforced; use a "
            f"pattern, or one of {', '.join(sorted(FORMATS))}"
        )
    if "pattern" in schema:
        _check_pattern(schema["pattern"], place.at("pattern"))
    for keyword in ("const", "enum"):
        if keyword in schema:
            _check_constant(schema[keyword], place.at(keyword))


def _check_arrays(place: Place, draft: int) -> None:
    """Refuse the ways to describe arrays that another draft than the schema's has."""
    schema = place.schema
    if "prefixItems" in schema and draft < 2020:
        raise SchemaRefused(
            f"{place.at('prefixItems')}: prefixItems is not in the draft that $schema names; "
            "leave $schema out, or use a list of items"
        )
    listed = isinstance(schema.get("items"), list)
    if listed and draft >= 2020:
        raise SchemaRefused(
            f"{place.at('items')}: a list of items is not in draft 2020-12; use prefixItems"
        )
    if "additionalItems" in schema and not listed:
        raise SchemaRefused(
            f"{place.at('additionalItems')}: additionalItems means nothing without a list of "
            "items; use items"
        )
    if "additionalItems" in schema and schema.keys() & set(IN_PLACE):
        raise SchemaRefused(
            f"{place.at('additionalItems')}: additionalItems is not enforced beside allOf, anyOf, "
            "oneOf or $ref; move them into a schema of allOf of their own"
        )


def _check_objects(place: Place) -> None:
    schema = place.schema
    required = schema.get("required", [])
    for name in (*schema.get("properties", ()), *required):
        if control := unspelled(name):
            raise SchemaRefused(
                f"{place.at('properties')}: the name {name!a} has the control character "
                f"{control!a}, which no answer can hold; remove it"
            )
    if schema.get("minProperties", 0) > len(set(required)) + 1:
        raise SchemaRefused(
            f"{place.at('minProperties')}: minProperties {schema['minProperties']} is not enforced,"
            " since a name that is not listed may come twice; list names in required, so that "
            f"they leave at most one to be counted (here {len(set(required))} are listed)"
        )
    for name in schema.get("patternProperties", ()):
        _check_pattern(name, place.at("patternProperties"))


def _check_pattern(pattern: str, where: str) -> None:
    try:
        translate(pattern)
    except SchemaRefused as error:
        raise SchemaRefused(f"{where}: {error}") from None


def _check_constant(value: object, where: str) -> None:
    """Refuse constants that an answer cannot hold, or that would be rounded."""
    waiting = [value]
    while waiting:
        part = waiting.pop()
        if isinstance(part, str) and (control := unspelled(part)):
            raise SchemaRefused(
                f"{where}: {shown(part)} has the control character {control!a}, which no answer "
                "can hold; remove it"
            )
        if isinstance(part, int | float) and not isinstance(part, bool):
            check_exact(part, where)
        elif isinstance(part, dict):
            waiting.extend((*part.keys(), *part.values()))
        elif isinstance(part, list):
            waiting.extend(part)


def _check_loops(found: list[Place]) -> None:
    """Refuse schemas that hold if they hold: ``$ref`` round to itself with nothing in between."""
    waits_for = {place: len(place.in_place) for place in found}
    holders: dict[Place, list[Place]] = {}
    for place in found:
        for inner in place.in_place:
            holders.setdefault(inner, []).append(place)
    ready = [place for place, count in waits_for.items() if not count]
    while ready:
        for holder in holders.get(ready.pop(), ()):
            waits_for[holder] -= 1
            if not waits_for[holder]:
                ready.append(holder)
    for place, count in waits_for.items():
        if count:
            raise SchemaRefused(
                f"{place.at()}: the schema refers to itself through $ref, allOf, anyOf or oneOf "
                "alone; put the reference into a property or an item"
            )


__all__ = ["OPTIONS", "exact", "refuse"]
