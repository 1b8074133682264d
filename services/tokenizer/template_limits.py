"""How large a value may become that a chat template makes, found out before it is made."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jinja2

MAX_CHARACTERS = 8 * 1024 * 1024
"""Longest rendered text and longest value made on the way."""
MAX_GROWTH = 16 * MAX_CHARACTERS
"""Bound on (input size * width), a coarse bound on what padding and formatting may make; and on
all that one rendering makes, kept or not."""
REFERENCE_BYTES = 8
_MAX_BITS = 4096

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
    """Characters in a value and what it contains, an item counting as 8 (a reference's bytes).

    Stops counting past the limit.
    """
    if isinstance(value, str | bytes):
        return len(value)
    if not isinstance(value, list | tuple | dict | set):
        return 0
    total = 0
    pending: list[Any] = [value]
    while pending and total <= MAX_GROWTH:
        item = pending.pop()
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, list | tuple | set):
            total += REFERENCE_BYTES * len(item)
            pending.extend(item)
        elif isinstance(item, dict):
            total += REFERENCE_BYTES * len(item)
            pending.extend(item)
            pending.extend(item.values())
    return total


def require(amount: int, limit: int = MAX_CHARACTERS) -> None:
    """Raise ``TemplateLimitExceeded`` for a value of so many characters."""
    if amount > limit:
        raise TemplateLimitExceeded(f"it makes a value larger than {MAX_CHARACTERS} characters")


def _width(arguments: Iterable[Any]) -> int:
    """How much each character of a value may be widened by these arguments."""
    total = 1
    for argument in arguments:
        total += abs(argument) if isinstance(argument, int) else size(argument)
    return total


def bound_growth(name: str, value: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Refuse a filter or method call whose result could be too large."""
    if name in _STRUCTURAL:
        return
    require(size(value))
    every = (*arguments, *named.values())
    if name == "replace" and isinstance(value, str) and len(arguments) >= 2:
        old, new = str(arguments[0]), str(arguments[1])
        require(len(value) + value.count(old) * len(new))
    elif name in _WIDENING:
        require(max(1, size(value)) * _width(every), MAX_GROWTH)
        if isinstance(value, str) and name in ("format", "format_map"):
            _bound_format(value)


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


def _bound_format(text: str) -> None:
    """A width of five digits or more in a format string pads; no chat template needs that."""
    digits = 0
    for character in text:
        digits = digits + 1 if character.isdigit() else 0
        if digits >= 5 or character == "*":
            raise TemplateLimitExceeded("it formats with a width that is too large")


def bound_joined(separator: str, items: list[Any]) -> None:
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
    elif operator == "%" and isinstance(left, str):
        _bound_format(left)
        require(len(left) + left.count("%") * size((right,)))


def _require_bits(bits: int) -> None:
    if bits > _MAX_BITS:
        raise TemplateLimitExceeded(f"it makes a number of more than {_MAX_BITS} bits")
