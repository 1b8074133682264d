"""Finds the end of a JSON value that comes in pieces, and passes it on as it comes.

Strings and depth are followed, nothing else: what a model writes goes to its client as it is. Each
character is looked at once, most of them within one regular expression.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.services.tokenizer.output.family import Arguments, Stops
from penstock.services.tokenizer.output.pattern import STAND_INS

_STRING = re.compile(r'(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+').match
"""The inside of a string, as far as it goes."""
_SPACE = re.compile(r"[ \t\r\n]*+").match
_OPENS = re.compile(r"[\[{]++").match
Match: TypeAlias = Callable[[str, int], "re.Match[str] | None"]


class _Expressions(NamedTuple):
    step: Match
    """Goes on behind the next brackets that open (group 1, and what lies between them) or close (2)
    and have no fellow a few levels on, behind the quote of a string that does not end (3), or to
    where an edge may begin."""
    word_end: Match
    """Finds what cannot be part of a bare word."""


@lru_cache(maxsize=64)
def _expressions(characters: str, edges: str) -> _Expressions:
    string = r'"(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+"'
    bare = rf'[^"\[\]{{}}{characters}]++'
    word_end = r"[,\]} \t\r\n]"
    if characters:
        bare += f"|(?!{edges})[{characters}]"
        word_end += f"|{edges}"
    inside = flat = f"{bare}|{string}"
    for _ in range(4):
        flat = rf"{inside}|[\[{{](?:{flat})*+[\]}}]"
    step = rf'(?:{flat})*+(?:((?:[\[{{](?:{bare})*+)++)|([\]}}]++)|("))?'
    return _Expressions(re.compile(step).match, re.compile(word_end).search)


class JsonScanner:
    """Reads one JSON value.

    An object or array goes out as it comes. A string or another value is held until it is whole: a
    string that holds an object goes out as that object, since some models quote their arguments;
    ``null`` stands for no arguments.
    """

    __slots__ = (
        "_arguments", "_depth", "_escaped", "_pieces", "_step", "_string", "_word_end",
        "done",
    )  # fmt: skip

    def __init__(self, arguments: Arguments, stops: Stops) -> None:
        self._arguments = arguments
        self._step, self._word_end = _expressions(str(stops), stops.edges)
        self._depth = 0
        self._string = False
        """Within a string."""
        self._escaped = False
        """… and behind a backslash."""
        self._pieces: list[str] | None = None
        """Of a value that is neither object nor array."""
        self.done = False

    def feed(self, text: str, start: int, final: bool) -> int:
        """Read from ``start`` on; see ``Scanner``."""
        if not self._depth and self._pieces is None:
            blank = _SPACE(text, start)
            start = blank.end() if blank is not None else start
            if start == len(text):
                return start
            if text[start] not in "{[":
                self._pieces = []
        if self._pieces is not None:
            return self._scalar(text, start)
        place = self._structure(text, start)
        self._arguments.write(text[start:place])
        return place

    def skip(self, character: str) -> None:
        """The character where ``feed`` stopped belongs to the value."""
        if self._pieces is None:
            self._arguments.write(character)
        else:
            self._pieces.append(character)

    def cut(self) -> None:
        """What is held back goes out as it stands."""
        if self._pieces is not None:
            self._arguments.write("".join(self._pieces))
            self._pieces = None

    def _structure(self, text: str, place: int) -> int:
        begin, end = place, len(text)
        if self._string:
            place = self._rest_of_string(text, place)
        if not self._depth and place < end:
            run = _OPENS(text, place)
            place = run.end() if run is not None else place
            self._depth = place - begin
        while place < end and not self._string:
            found = self._step(text, place)
            if found is None or found.lastindex is None:
                return found.end() if found is not None else place
            place = found.end()
            if found.lastindex == 1:
                self._depth += found[1].count("{") + found[1].count("[")
            elif found.lastindex == 2:
                first = found.start(2)
                if place - first >= self._depth:
                    self.done = True
                    return first + self._depth
                self._depth -= place - first
            else:
                self._string = True
                place = self._rest_of_string(text, place)
        return place

    def _rest_of_string(self, text: str, place: int) -> int:
        """Go on within a string. Returns the place behind its end, or the end of the text."""
        if place == len(text):
            return place
        if self._escaped:
            self._escaped = False
            place += STAND_INS.match(text, place) is None
        match = _STRING(text, place)
        place = match.end() if match is not None else place
        if place == len(text):
            return place
        if text[place] == '"':
            self._string = False
            return place + 1
        if text[place] == "\\":
            self._escaped = True
            return place + 1
        return place

    def _scalar(self, text: str, start: int) -> int:
        """Read a string up to its quote, or a bare word up to what cannot be a part of one."""
        pieces = self._pieces
        if pieces is None:
            return start
        place = start
        if not pieces and text[place] == '"':
            pieces.append('"')
            self._string = True
            start = place = place + 1
        within = self._string
        if within:
            place = self._rest_of_string(text, place)
            pieces.append(text[start:place])
            if not self._string:
                self.done = True
                self._arguments.write(_unquoted("".join(pieces)))
            return place
        if pieces and pieces[0] == '"':
            return place
        found = self._word_end(text, place)
        place = found.start() if found is not None else len(text)
        pieces.append(text[start:place])
        if found is not None and found[0] in ",]} \t\r\n":
            self.done = True
            word = "".join(pieces)
            self._arguments.write("" if word == "null" else word)
        return place


def _unquoted(text: str) -> str:
    """The object within a string, if there is one; else the string."""
    try:
        inside = msgspec.json.decode(text, type=str)
        msgspec.json.decode(inside, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return inside
