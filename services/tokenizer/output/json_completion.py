"""What is lacking at the end of a JSON text that breaks off."""

from __future__ import annotations

import re
from collections.abc import Callable

import msgspec

_PARTS = re.compile(r'"(?:[^"\\]++|\\.)*+("?)|[\[\]{}]', re.DOTALL)
_ESCAPE = re.compile(r"(?<!\\)(?:\\\\)*+(\\(?:u[0-9a-fA-F]{0,3})?)\Z")
"""The beginning of one at a string's end."""
_TAIL = 4096
"""Characters of an end in which that is looked for."""
_WORD = re.compile(r"[a-z]{1,5}\Z")
_WORDS = ("true", "false", "null")
_AFTER = {",": ("null", '"": null'), ":": ("null",), '"': ("", ": null")}
"""What may follow a character for the value, or its lack, to be whole …"""
_IN_NUMBER = "-+.eE"
"""… and characters that a digit must follow."""


def completion(text: str, spend: Callable[[], bool]) -> str:
    """What to put behind a text to make it JSON, so that all of it stays; empty where it is JSON
    already, or nothing makes it so.

    spend: is asked for each string and bracket of a text that is no JSON. ``False``: it is left as
    it is.
    """
    if _is_json(text):
        return ""
    text = text.rstrip(" \t\r\n") or text
    closing: list[str] = []
    within = False
    for part in _PARTS.finditer(text):
        if not spend():
            return ""
        if part[0][0] == '"':
            within = not part[1]
        elif part[0] in "[{":
            closing.append("]" if part[0] == "[" else "}")
        elif closing:
            closing.pop()
    ends = _string_ends(text) if within else _value_ends(text)
    rest = "".join(reversed(closing))
    return next((end + rest for end in ends if _is_json(text + end + rest)), "")


def _string_ends(text: str) -> tuple[str, ...]:
    """What ends the string, which may be a value or a name."""
    begun = _ESCAPE.search(text[-_TAIL:])
    escape = ""
    if begun is not None:
        escape = "\\" if begun[1] == "\\" else "0" * (6 - len(begun[1]))
    return f'{escape}"', f'{escape}": null'


def _value_ends(text: str) -> tuple[str, ...]:
    last = text[-1:]
    if last in _AFTER:
        return _AFTER[last]
    found = _WORD.search(text)
    if found is not None:
        ends = [word[len(found[0]) :] for word in _WORDS if word.startswith(found[0])]
        if ends:
            return tuple(ends)
    return ("0",) if last and last in _IN_NUMBER else ("",)


def _is_json(text: str) -> bool:
    try:
        msgspec.json.decode(text, type=msgspec.Raw)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return False
    return True
