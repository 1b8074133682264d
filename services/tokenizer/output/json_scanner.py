"""Finds the end of a JSON value that comes in pieces, and passes it on as it comes.

Strings and depth are followed, nothing else: what a model writes goes to its client as it is. One
regular expression reads many characters at once, and their brackets are counted together.
"""

from __future__ import annotations

import re
from array import array
from bisect import bisect_left
from collections.abc import Callable
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple, TypeAlias

import msgspec

from penstock.services.tokenizer.output.family import Arguments, Stops
from penstock.services.tokenizer.output.json_completion import completion
from penstock.services.tokenizer.output.pattern import STAND_INS

_STRING = re.compile(r'(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+').match
"""The inside of a string, as far as it goes."""
_SPACE = re.compile(r"[ \t\r\n]*+").match
_IN_STRING = r'[^"\\\ud800-\udfff]'
_WHOLE_STRING = rf'"{_IN_STRING}*+(?:\\[^\ud800-\udfff]{_IN_STRING}*+)*+"'
_SHORT_STRING = rf'"{_IN_STRING}{{0,64}}+(?:\\[^\ud800-\udfff]{_IN_STRING}{{0,64}}+){{0,8}}+"'
_STRINGS = re.compile(rf'"({_WHOLE_STRING[1:-1]})"')
_SIGNS = bytes({"[": 1, "{": 1, "]": 255, "}": 255}.get(chr(code), 0) for code in range(256))
"""What each character adds to the depth, as signed bytes."""
_FLAT = bytes(code for code, sign in enumerate(_SIGNS) if not sign)
_WORD_ENDS = ",]} \t\r\n"
Match: TypeAlias = Callable[[str, int], "re.Match[str] | None"]


class _Expressions(NamedTuple):
    step: Match
    """Goes on to where an edge may begin, or behind the quote of a string that is long or does not
    end (2), or as far as a step goes. From the first bracket on it is group 1, which is short:
    where the value ends, the rest of it has been read in vain."""
    word: Match
    """A bare word, as far as it goes."""


@lru_cache(maxsize=64)
def _expressions(characters: str, edges: str, idle: str) -> _Expressions:
    def but(ends: str, many: str = "++") -> str:
        """Anything but these and the edges."""
        others = f"|(?![{ends}])(?:{idle}(?!{edges})[{characters}])" if characters else ""
        return f"[^{ends}{characters}]{many}{others}"

    flat, nested, word = but(r'"\[\]{}'), but('"', "{1,8}+"), but(re.escape(_WORD_ENDS))
    step = rf'(?:{flat}|{_WHOLE_STRING})*+((?:{nested}|{_SHORT_STRING}){{0,128}}+)(")?'
    return _Expressions(re.compile(step).match, re.compile(f"(?:{word})*+").match)


class JsonScanner:
    """Reads one JSON value.

    An object or array goes out as it comes. A string or another value is held until it is whole: a
    string that holds an object goes out as that object, since some models quote their arguments;
    ``null`` stands for no arguments.
    """

    __slots__ = (
        "_arguments", "_depth", "_escaped", "_pieces", "_step", "_string", "_word",
        "done",
    )  # fmt: skip

    def __init__(self, arguments: Arguments, stops: Stops) -> None:
        self._arguments = arguments
        self._step, self._word = _expressions(str(stops), stops.edges, stops.idle)
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

    def end(self) -> None:
        """A string that has not ended does so here; the beginning of a word is no arguments."""
        if self._pieces is not None and self._string:
            text = "".join(self._pieces)
            text += completion(text, self._arguments.spend)
            self._arguments.write(_unquoted(text, self._arguments.spend))
        self._pieces = None

    def _structure(self, text: str, place: int) -> int:
        end = len(text)
        if self._string:
            place = self._rest_of_string(text, place)
        while place < end and not self._string:
            found = self._step(text, place)
            if found is None or found.end() == place:
                return place
            place = found.end()
            if found[1] and (length := self._end_of_value(found[1])):
                self.done = True
                return found.start(1) + length
            if found[2]:
                self._string = True
                place = self._rest_of_string(text, place)
        return place

    def _end_of_value(self, text: str) -> int:
        """Count the brackets of a text that begins and ends outside of strings. Returns how much of
        it belongs to the value; 0: that goes on."""
        parts = _STRINGS.split(text) if "\\" in text else text.split('"')  # each second is a string
        plain = "".join(parts[::2]).encode("ascii", "replace")
        turns = plain.translate(_SIGNS, _FLAT)
        while b"\x01\xff" in turns:  # what closes at once ends nothing else
            turns = turns.replace(b"\x01\xff", b"")
        closing = turns.count(b"\xff")
        if closing < self._depth:
            self._depth += len(turns) - 2 * closing
            return 0
        depths = list(accumulate(array("b", plain.translate(_SIGNS)), initial=self._depth))
        try:
            length = depths.index(0, 1)
        except ValueError:
            self._depth = depths[-1]
            return 0
        strings = bisect_left(list(accumulate(map(len, parts[::2]))), length)
        return length + sum(map(len, parts[1 : 2 * strings : 2])) + 2 * strings

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
                self._arguments.write(_unquoted("".join(pieces), self._arguments.spend))
            return place
        if pieces and pieces[0] == '"':
            return place
        found = self._word(text, place)
        place = found.end() if found is not None else place
        pieces.append(text[start:place])
        if place < len(text) and text[place] in _WORD_ENDS:
            self.done = True
            word = "".join(pieces)
            self._arguments.write("" if word == "null" else word)
        return place


def _unquoted(text: str, spend: Callable[[], bool]) -> str:
    """The object within a string, if there is one; else the string. spend: see ``completion``."""
    try:
        inside = msgspec.json.decode(text, type=str)
        inside += completion(inside, spend)
        msgspec.json.decode(inside, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return inside
