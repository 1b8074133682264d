"""How large a value may become that a chat template makes, found out before it is made."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from types import MethodType
from typing import Any

import jinja2
from jinja2.utils import Namespace

MAX_CHARACTERS = 8 * 1024 * 1024
"""Longest rendered text and longest value made on the way."""
MAX_GROWTH = 16 * MAX_CHARACTERS
"""Bound on (input size * width), a coarse bound on what padding and formatting may make; and on
all that one rendering makes, kept or not."""
REFERENCE_BYTES = 8
_MAX_BITS = 4096
_BITS_A_DIGIT = 3
"""At least."""
_MAX_PRECISION = 1024
_SEVERAL: tuple[type[Iterable[Any]], ...] = (
    list, tuple, set, *map(type, ({}.keys(), {}.values(), {}.items())),
)  # fmt: skip

_WIDENING = {
    "batch", "center", "expandtabs", "format", "format_map", "indent", "ljust", "rjust", "slice",
    "to_bytes", "tojson", "translate", "urlize", "wordwrap", "xmlattr", "zfill",
}  # fmt: skip
"""Filters and methods whose result can be as large as (value * sum of arguments)."""
_STRUCTURAL = {
    "attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length",
    "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "unique",
}  # fmt: skip
"""Filters that never turn a container into text: measuring it at each use would be quadratic."""

_ITEMIZING = {
    "batch", "groupby", "join", "list", "map", "max", "min", "reject", "rejectattr", "select",
    "selectattr", "slice", "sort", "sum", "unique",
}  # fmt: skip
"""Filters that take a text apart into its characters."""
_SPACES = "".join(filter(str.isspace, map(chr, range(0x3001))))
NEW_ITEM_BYTES = 64
"""What a small new text costs beside its characters."""


class TemplateLimitExceeded(jinja2.TemplateRuntimeError):
    """The template asked for more time or memory than a rendering may take."""


def size(value: Any) -> int:
    """Characters in a value and what it contains, an item counting as 8 (a reference's bytes), and
    digits in a whole number.

    Stops counting past ``MAX_CHARACTERS``.
    """
    if isinstance(value, str | bytes):
        return len(value)
    total = 0
    pending: list[Any] = [value]
    while pending and total <= MAX_CHARACTERS:
        item = pending.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // _BITS_A_DIGIT
        elif held := _held(item):
            total += REFERENCE_BYTES * len(held)
            pending.extend(held)
    return total


def strings_in(value: Any) -> Iterator[str]:
    """All texts in a value that is not too large."""
    pending: list[Any] = [value]
    while pending:
        item = pending.pop()
        if isinstance(item, str):
            yield item
        pending.extend(_held(item))


def _held(value: Any) -> list[Any]:
    """What stands in the text of a value that contains others."""
    if isinstance(value, _SEVERAL):
        return list(value)
    if isinstance(value, Namespace):
        value = object.__getattribute__(value, "_Namespace__attrs")
    if isinstance(value, dict):
        return [*value, *value.values()]
    if isinstance(value, MethodType):
        return [value.__self__]
    return []


def _depth(value: Any) -> int:
    """How many containers lie within each other, at most. Only for what is not too large."""
    deepest, pending = 0, [(value, 1)]
    while pending:
        one, depth = pending.pop()
        deepest = max(deepest, depth)
        pending += [(item, depth + 1) for item in _held(one)]
    return deepest


def require(amount: int, limit: int = MAX_CHARACTERS) -> None:
    """Raise ``TemplateLimitExceeded`` for a value of so many characters."""
    if amount > limit:
        raise TemplateLimitExceeded(f"it makes a value larger than {MAX_CHARACTERS} characters")


def _width(arguments: Iterable[Any]) -> int:
    """How much each character of a value may be widened by these arguments."""
    total = 1
    for argument in arguments:
        if isinstance(argument, int):
            total += abs(argument)
        else:
            amount = size(argument)
            require(amount)
            total += amount
    return total


def bound_growth(name: str, value: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a filter or method call whose result could be too large."""
    if name in _STRUCTURAL:
        return
    amount = size(value)
    require(amount)
    every = (*arguments, *named.values())
    if name == "replace":
        _bound_replaced(value, {**dict(zip(("old", "new"), arguments, strict=False)), **named})
    elif name == "round":
        if any(isinstance(one, int) and abs(one) > _MAX_PRECISION for one in every):
            raise TemplateLimitExceeded(f"it rounds to more than {_MAX_PRECISION} digits")
    elif name == "pprint":  # whose lines begin as far in as the keys around them are long
        require(amount**2 // REFERENCE_BYTES, MAX_GROWTH)
    elif name in _WIDENING:
        width = _width(every)
        require(max(1, amount) * width, MAX_GROWTH)
        if name == "tojson" and width > 1:  # a line for each item, the further in the deeper
            require(amount // REFERENCE_BYTES * width * _depth(value), MAX_GROWTH)
        if isinstance(value, str) and name in ("format", "format_map"):
            bound_format(value)


def _bound_replaced(value: Any, given: Mapping[str, Any]) -> None:
    if "old" in given and "new" in given:
        is_bytes = isinstance(value, bytes)
        text, old, new = (
            one if is_bytes else str(one) for one in (value, given["old"], given["new"])
        )
        require(len(text) + text.count(old) * len(new))


def pieces(name: str, value: Any, arguments: tuple[Any, ...]) -> int:
    """How many new texts a filter or method cuts a text into, at most."""
    if not isinstance(value, str):
        return 0
    if name in _ITEMIZING:
        return len(value)
    first = arguments[0] if arguments else None
    if name in ("split", "rsplit", "replace") and isinstance(first, str):
        return value.count(first)
    if name in ("split", "rsplit", "splitlines"):
        return sum(map(value.count, _SPACES))
    return 0


def bound_format(text: str) -> None:
    """A width of five digits or more in a format string pads; no chat template needs that."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits >= 5 or character == "*":
            raise TemplateLimitExceeded("it formats with a width that is too large")


def bound_joined(separator: str | bytes, items: list[Any]) -> None:
    """Refuse a join whose result would be too large."""
    require(size(items) + len(separator) * len(items))


def bound_operator(operator: str, left: Any, right: Any) -> None:
    """Refuse an operation whose result would be too large."""
    if operator == "+":
        if not isinstance(left, int | float):
            require(size(left) + size(right))
    elif operator == "*":
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() + right.bit_length())
        elif isinstance(left, int):
            require(size(right) * max(left, 0))
        elif isinstance(right, int):
            require(size(left) * max(right, 0))
    elif operator == "**":
        if isinstance(left, int) and isinstance(right, int):
            _require_bits(left.bit_length() * max(right, 0))
    elif operator == "%" and isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        bound_format(text)
        require(len(text) + text.count("%") * size((right,)))


def _require_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitExceeded(f"it makes a number of more than {_MAX_BITS} bits")
