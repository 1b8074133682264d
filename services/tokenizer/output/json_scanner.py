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
from penstock.services.tokenizer.output.json_completion import completion
from penstock.services.tokenizer.output.pattern import STAND_INS

_STRING = re.compile(r'(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+').match
"""The inside of a string, as far as it goes."""
_SPACE = re.compile(r"[ \t\r\n]*+").match
_WHOLE_STRING = r'"(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+"'
_NO_BRACKETS = re.compile(rf'[^"\[\]{{}}]++|{_WHOLE_STRING}')
_TO_BRACKET = re.compile(rf'(?:[^"\[\]{{}}]++|{_WHOLE_STRING})*+[\[\]{{}}]').match
_WORD_ENDS = ",]} \t\r\n"
_MOST = 256
"""Strings, brackets and what lies between them in one step. Where a value ends, all that the step
has read behind it was in vain."""
Match: TypeAlias = Callable[[str, int], "re.Match[str] | None"]


class _Expressions(NamedTuple):
    step: Match
    """Goes on to where an edge may begin, or behind the quote of a string that does not end (2), or
    as far as a step goes. From the first bracket on it is group 1."""
    word: Match
    """A bare word, as far as it goes."""


@lru_cache(maxsize=64)
def _expressions(characters: str, edges: str) -> _Expressions:
    bare = r'[^"\[\]{}' + characters + "]++"
    bracket = r"[\[\]{}]"
    word = rf"[^{re.escape(_WORD_ENDS)}{characters}]++"
    if characters:
        bare += rf"|(?!{bracket}|{edges})[{characters}]"
        bracket = f"(?!{edges}){bracket}"
        word += f"|(?![{re.escape(_WORD_ENDS)}]|{edges})[{characters}]"
    plain = f"{bare}|{_WHOLE_STRING}"
    step = rf'(?:{plain}){{0,{_MOST}}}+((?:{bracket}|{plain}){{0,{_MOST}}}+)(")?'
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
        self._step, self._word = _expressions(str(stops), stops.edges)
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
            self._arguments.write(_unquoted(text + completion(text)))
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
            if found[1]:
                brackets = _NO_BRACKETS.sub("", found[1])
                closing = brackets.count("}") + brackets.count("]")
                if closing < self._depth:
                    self._depth += len(brackets) - 2 * closing
                elif number := self._end_of_value(brackets):
                    self.done = True
                    return _behind_bracket(text, found.start(1), number)
            if found[2]:
                self._string = True
                place = self._rest_of_string(text, place)
        return place

    def _end_of_value(self, brackets: str) -> int:
        """How many of these brackets it takes to the end of the value; 0: it goes on."""
        depth = self._depth
        for number, bracket in enumerate(brackets, 1):
            depth += 1 if bracket in "[{" else -1
            if not depth:
                return number
        self._depth = depth
        return 0

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
        found = self._word(text, place)
        place = found.end() if found is not None else place
        pieces.append(text[start:place])
        if place < len(text) and text[place] in _WORD_ENDS:
            self.done = True
            word = "".join(pieces)
            self._arguments.write("" if word == "null" else word)
        return place


def _behind_bracket(text: str, place: int, number: int) -> int:
    """The place behind so many brackets that stand in no string."""
    for _ in range(number):
        found = _TO_BRACKET(text, place)
        if found is None:
            break
        place = found.end()
    return place


def _unquoted(text: str) -> str:
    """The object within a string, if there is one; else the string."""
    try:
        inside = msgspec.json.decode(text, type=str)
        inside += completion(inside)
        msgspec.json.decode(inside, type=dict)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return text
    return inside
