"""The input of a custom tool, read out of the JSON of a function's arguments while they come."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from penstock.services.frontend.dialects.responses.tools import INPUT

_OPENING = re.compile(r'\s*\{\s*"' + INPUT + r'"\s*:\s*"')
_ESCAPE = re.compile(r'\\(?:u[0-9a-fA-F]{4}|["\\/bfnrt])')
_HIGH = re.compile(r"\\u[dD][89abAB][0-9a-fA-F]{2}")
_END = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


class CustomInput:
    """Gives the text of ``{"input": "…"}`` as far as it is certain, at any split of the JSON.

    What has another form is given at the end: a model may have written the input without JSON.
    """

    def __init__(self) -> None:
        self._rest = ""
        """Of the arguments: what has not been read."""
        self._is_open = self._is_closed = False
        """The string has begun, and ended."""
        self._given: list[str] = []

    def feed(self, arguments: str) -> str:
        """More of the arguments. Returns what they add to the input."""
        if self._is_closed:
            return ""
        self._rest += arguments
        if not self._is_open:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._is_open = True
            self._rest = self._rest[opening.end() :]
        return self._give(self._read())

    def end(self) -> str:
        """Nothing more comes. Returns what that adds to the input."""
        return "" if self._is_open else self._give(_of_another_form(self._rest))

    @property
    def whole(self) -> str:
        """All that was given."""
        return "".join(self._given)

    def _give(self, text: str) -> str:
        if text:
            self._given.append(text)
        return text

    def _read(self) -> str:
        """The next characters of the string that no later one can change."""
        closed = _END.match(self._rest)
        if closed is not None:
            self._is_closed = True
            taken = self._rest[: closed.end() - 1]
        else:
            taken = _whole_escapes(self._rest)
        self._rest = self._rest[len(taken) :]
        return _decoded(taken)


def _whole_escapes(text: str) -> str:
    """Without an escape at the end that may go on, and without one half of a pair of surrogates."""
    tail = text.rfind("\\", max(0, len(text) - 12))
    while tail > 0 and _backslashes(text, tail) % 2 == 0:
        tail -= 1  # the second one of an escaped backslash
    if tail < 0:
        return text
    escape = _ESCAPE.match(text, tail)
    if escape is not None and not (escape.end() == len(text) and _HIGH.match(text, tail)):
        return text
    text = text[:tail]
    before = len(text) - 6
    if before >= 0 and _HIGH.match(text, before) and _backslashes(text, before) % 2:
        return text[:before]  # its other half may be what has just begun
    return text


def _backslashes(text: str, last: int) -> int:
    """How many follow each other up to ``last``, which is one."""
    first = last
    while first > 0 and text[first - 1] == "\\":
        first -= 1
    return last - first + 1


def _decoded(taken: str) -> str:
    if "\\" not in taken:
        return taken
    try:
        decoded: str = json.loads(f'"{taken}"', strict=False)
    except ValueError:
        return taken
    return decoded.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def _of_another_form(arguments: str) -> str:
    try:
        value: Any = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return arguments
    if isinstance(value, dict) and isinstance(value.get(INPUT), str):
        return str(value[INPUT])
    return value if isinstance(value, str) else arguments
