"""What becomes of each field of each route, as a table for ``docs/api.md``.

``python -m penstock.services.frontend.bodies.field_table`` prints it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

import msgspec

from penstock.protocol.declared import (
    NO_EFFECT,
    Declared,
    SameAs,
    description_of,
    fields_of,
    members_of,
    unwrapped,
)
from penstock.services.frontend.bodies.routes import RouteBodies

HEAD = """\
| route, object in it | honoured | without effect | refused by name, except with these values |
| --- | --- | --- | --- |"""


def rows(routes: Sequence[RouteBodies]) -> Iterator[str]:
    """A line for each body and each object in it. An object that several bodies have stands once,
    with the first of them."""
    shown: set[type[Declared]] = set()
    for route in routes:
        if route.takes is not None:
            for place, of in _objects(f"`{route.method} {route.path}`", route.takes):
                if of not in shown:
                    shown.add(of)
                    yield _row(place, of)
                elif of is route.takes:
                    yield f"| {place} | as above | | |"


def table(routes: Sequence[RouteBodies]) -> str:
    return "\n".join((HEAD, *rows(routes))) + "\n"


def _objects(place: str, of: type[Declared]) -> Iterator[tuple[str, type[Declared]]]:
    """An object and those within it, each with the place where it stands."""
    yield place, of
    for name, field in fields_of(of).items():
        for path, inner in _within(name, field):
            yield from _objects(f"{place} `{path}`", inner)


def _within(name: str, field: Any) -> Iterator[tuple[str, type[Declared]]]:
    for member in members_of(field):
        base, _ = unwrapped(member)
        if isinstance(base, type) and issubclass(base, Declared):
            yield name, base
        elif not isinstance(base, type) or not issubclass(base, msgspec.Struct):
            for item in get_args(base):
                if not isinstance(item, str | int | bool):
                    yield from _within(f"{name}[]", item)


def _row(place: str, of: type[Declared]) -> str:
    honoured: list[str] = []
    idle: list[str] = []
    for name, field in fields_of(of).items():
        (idle if description_of(field).startswith(NO_EFFECT) else honoured).append(name)
    refused = [
        f"`{name}` ({_values(neutral)})"
        for name, neutral in of.NEUTRAL.items()
        if name not in fields_of(of)
    ]
    return f"| {place} | {_names(honoured)} | {_names(idle)} | {', '.join(refused)} |"


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _values(neutral: tuple[Any, ...] | SameAs) -> str:
    """What asks for nothing, beside null."""
    if isinstance(neutral, SameAs):
        return f"that of `{neutral.name}`"
    if len(neutral) > 8:
        return f"{neutral[0]} to {neutral[-1]}"
    return ", ".join(msgspec.json.encode(one).decode() for one in neutral) or "null"


if __name__ == "__main__":
    import sys

    from penstock.services.frontend.api_page import described
    from penstock.services.frontend.dialects.registry import BUILT_IN

    sys.stdout.write(table(described(BUILT_IN)))
