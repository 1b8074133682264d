"""What an object of a client's JSON may hold: structs with bounds on their fields, and in words."""

from __future__ import annotations

import types
from collections.abc import Mapping
from functools import cache
from typing import (
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

import msgspec
from msgspec import Meta

from penstock.protocol.shown_values import show
from penstock.protocol.suggestions import ForeignNames

_KINDS: dict[Any, str] = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "an array",
    dict: "an object",
}
_MANY = {int: "whole numbers", float: "numbers", str: "strings", list: "arrays", dict: "objects"}


class SameAs(NamedTuple):
    """A value that asks for nothing while it is that of another field."""

    name: str
    default: Any


NO_ITEMS: tuple[Any, ...] = ([],)
"""Asks for nothing as an empty array, and must be an array."""
NO_EFFECT = "Has no effect"
"""How the description of a field begins that is accepted and changes nothing."""


def said(description: str) -> Meta:
    """What a field means."""
    return Meta(description=description)


class Declared(msgspec.Struct, forbid_unknown_fields=True, kw_only=True, omit_defaults=True):
    """An object of a client's JSON."""

    NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...] | SameAs]] = {}
    """Values that ask for nothing, as does ``null``, by the field's name. A field that is not
    declared is known, not supported yet, and refused with any other value."""
    FOREIGN: ClassVar[ForeignNames] = ForeignNames({}, {})
    """What to use instead of names that other servers have."""
    IS_ONE_PARAM: ClassVar[bool] = False
    """Errors within it name it as a whole as the parameter at fault."""


@cache
def fields_of(declared: type[msgspec.Struct]) -> dict[str, Any]:
    """The types of a struct's fields by their names."""
    hints = get_type_hints(declared, include_extras=True)
    return {name: hints[name] for name in declared.__struct_fields__}


@cache
def required(declared: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(f.name for f in msgspec.structs.fields(declared) if f.required)


def unwrapped(declared: Any) -> tuple[Any, list[Meta]]:
    """A type without its annotations, and these."""
    if get_origin(declared) is not Annotated:
        return declared, []
    inner, *found = get_args(declared)
    base, bounds = unwrapped(inner)
    return base, [*(one for one in found if isinstance(one, Meta)), *bounds]


def members_of(declared: Any) -> list[Any]:
    """The types of a union but for null, or the type itself."""
    base, _ = unwrapped(declared)
    if get_origin(base) in (Union, types.UnionType):
        return [one for part in get_args(base) for one in members_of(part) if one is not type(None)]
    return [declared]


def kind_of(base: Any) -> Any:
    """The Python type that a value of JSON has for it; ``Any`` for any."""
    origin = get_origin(base) or base
    if origin is Literal:
        return str
    return dict if isinstance(origin, type) and issubclass(origin, msgspec.Struct) else origin


def is_of_kind(value: Any, base: Any) -> bool:
    kind = kind_of(base)
    if kind is Any:
        return True
    if isinstance(value, bool) or kind is bool:
        return kind is bool and isinstance(value, bool)
    if kind is float:
        return isinstance(value, int | float)
    return isinstance(value, list | tuple if kind is list else kind)


# --- in words


def description_of(declared: Any) -> str:
    """The description of a type, or of the first one within it that has any."""
    base, found = unwrapped(declared)
    for meta in reversed(found):  # what was said last is said of the whole
        if meta.description:
            return meta.description
    parts = () if get_origin(base) is Literal else get_args(base)
    return next((said for part in parts if (said := description_of(part))), "")


def describe(declared: Any) -> str:
    """What is allowed, for a sentence: ``a whole number from 1 to 128``."""
    if len(members := members_of(declared)) > 1:
        *some, last = map(describe, members)
        return f"{', '.join(some)} or {last}"
    base, bounds = unwrapped(members[0])
    if get_origin(base) is Literal:
        *some, last = map(show, get_args(base))
        return f"{', '.join(some)} or {last}" if some else f"only {last}"
    kind = kind_of(base)
    words = _KINDS.get(kind, "another value")
    if kind in (int, float):
        allowed = range_of(bounds)
        return " ".join(filter(None, (words, _BEFORE.get(allowed[:2], "from"), allowed))).rstrip()
    items = {str: "characters", list: _items(base), dict: "entries"}.get(kind, "")
    sizes = _sizes(bounds)
    if sizes or kind is list:
        words = " ".join(filter(None, (words, "of", sizes, items)))
    return f"{words} that is not empty" if least_and_most(bounds) == (1, None) else words


_BEFORE = {"": "", "ab": "", "at": "of"}
"""What stands before a range, by the range's beginning."""


def _items(base: Any) -> str:
    """The items of an array, for a sentence."""
    kinds = [kind_of(unwrapped(one)[0]) for one in members_of((*get_args(base), Any)[0])]
    return " or ".join(_MANY.get(one, "values") for one in kinds)


def range_of(bounds: list[Meta]) -> str:
    """``0 to 2``; nothing where all numbers are allowed."""
    ge, gt, le = (
        next((getattr(one, name) for one in bounds if getattr(one, name) is not None), None)
        for name in ("ge", "gt", "le")
    )
    if ge is not None and le is not None:
        return f"{_plain(ge)} to {_plain(le)}"
    found = (("at least", ge), ("above", gt), ("at most", le))
    return " and ".join(f"{words} {_plain(one)}" for words, one in found if one is not None)


def _sizes(bounds: list[Meta]) -> str:
    least, most = least_and_most(bounds)
    if least and most is not None:
        return f"{least} to {most}"
    return f"at most {most}" if most is not None else f"at least {least}" if least > 1 else ""


def least_and_most(bounds: list[Meta]) -> tuple[int, int | None]:
    least = next((one.min_length for one in bounds if one.min_length is not None), 0)
    return least, next((one.max_length for one in bounds if one.max_length is not None), None)


def _plain(number: float) -> str:
    return str(int(number)) if number == int(number) else repr(number)
