"""A schema in words that the compiler enforces to the letter, with the same meaning."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from penstock.protocol.json_schema.formats import OWN
from penstock.protocol.json_schema.keywords import ENFORCED, Kind, asks_for_nothing
from penstock.protocol.json_schema.patterns import translate
from penstock.protocol.json_schema.places import places


def exact(schema: dict[str, Any]) -> dict[str, Any]:
    """What to compile for ``schema``, which ``refuse`` has let through. ``schema`` stays as it is.

    Patterns are in the compiler's syntax, ``oneOf`` is ``anyOf`` (no two hold at once), and
    formats that it gets wrong are patterns. An answer may be narrower than the schema, never wider.
    """
    root = deepcopy(schema)
    for place in places(root):
        _rewrite(place.schema)
    return root


def _rewrite(schema: dict[str, Any]) -> None:
    before = dict(schema)
    more: list[Any] = []
    schema.clear()
    for keyword, value in before.items():
        if asks_for_nothing(keyword, value) or keyword in ("$id", "$anchor"):
            continue
        if ENFORCED.get(keyword) is Kind.COUNT:
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
