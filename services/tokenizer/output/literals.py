"""Literals of Python and JSON, read without being evaluated."""

from __future__ import annotations

import re

_SPACE = re.compile(r"[ \t\r\n]*+")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,400})(?:\.[0-9]{1,400})?(?:[eE][+-]?[0-9]{1,3})?")
_WHOLE = re.compile(
    r"[+-]?(?:0[xX][0-9a-fA-F_]{1,99}|0[oO][0-7_]{1,99}|0[bB][01_]{1,99}|[1-9][0-9_]{0,99})"
)
_POINT = re.compile(r"[+-]?(?:[0-9]{1,99}\.[0-9]{0,99}|\.[0-9]{1,99})(?:[eE][+-]?[0-9]{1,3})?")
_CONSTANTS = {
    "true": "true", "True": "true", "false": "false", "False": "false",
    "null": "null", "None": "null",
}  # fmt: skip
PREFIXES = frozenset({"f", "u", "r", "b", "F", "U", "R", "B"})
"""What Python allows before a string. It is dropped."""


def json_literal(word: str) -> str | None:
    """A literal as JSON; ``None``: it is none."""
    constant = _CONSTANTS.get(word)
    if constant is not None:
        return constant
    if _NUMBER.fullmatch(word):
        return word
    try:
        if _WHOLE.fullmatch(word):
            return str(int(word, 0))
        if _POINT.fullmatch(word):
            value = float(word)
            return repr(value) if value - value == 0 else None
    except ValueError:
        return None
    return None


def end_of_space(text: str, place: int) -> int:
    found = _SPACE.match(text, place)
    return found.end() if found is not None else place
