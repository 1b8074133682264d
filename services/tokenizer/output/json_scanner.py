"""Finds the end of a JSON value that comes in pieces, and passes it on as it comes.

Strings and depth are followed, nothing else: what a model writes goes to its client as it is. Each
character is looked at once, most of them within one regular expression.
"""

from __future__ import annotations

import re
from functools import lru_cache

import msgspec

from penstock.services.tokenizer.output.family import Arguments
from penstock.services.tokenizer.output.pattern import STAND_INS

_STRING = re.compile(r'(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+').match
"""The inside of a string, as far as it goes."""
_SPACE = re.compile(r"[ \t\r\n]*+").match
_OPENS = re.compile(r"[\[{]++").match
_CLOSES = re.compile(r"[\]}]++").match


@lru_cache(maxsize=64)
def _between(stops: str) -> re.Pattern[str]:
    """Whatever lies before the next bracket, or the next of ``stops``."""
    plain = rf'[^"\[\]{{}}{stops}]++|"(?:[^"\\\ud800-\udfff]++|\\[^\ud800-\udfff])*+"'
    flat = rf"\{{(?:{plain})*+\}}|\[(?:{plain})*+\]"
    return re.compile(rf"(?:{plain}|{flat})*+")


@lru_cache(maxsize=64)
def _word_end(stops: str) -> re.Pattern[str]:
    """What cannot be part of a bare word."""
    return re.compile(rf"[,\]}} \t\r\n{stops}]")


class JsonScanner:
    """Reads one JSON value.

    An object or array goes out as it comes. A string or another value is held until it is whole: a
    string that holds an object goes out as that object, since some models quote their arguments;
    ``null`` stands for no arguments.
    """

    __slots__ = (
        "_arguments", "_between", "_depth", "_escaped", "_pieces", "_string",
        "_word_end", "done",
    )  # fmt: skip

    def __init__(self, arguments: Arguments, stops: str) -> None:
        self._arguments = arguments
        self._between = _between(stops).match
        self._word_end = _word_end(stops).search
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
        end = len(text)
        if self._string:
            place = self._rest_of_string(text, place)
        while place < end and not self._string:
            if self._depth:
                match = self._between(text, place)
                place = match.end() if match is not None else place
                if place == end:
                    break
            run = _OPENS(text, place)
            if run is not None:
                self._depth += run.end() - place
                place = run.end()
                continue
            run = _CLOSES(text, place)
            if run is not None:
                count = run.end() - place
                if count >= self._depth:
                    self.done = True
                    return place + self._depth
                self._depth -= count
                place = run.end()
            elif text[place] == '"':
                self._string = True
                place = self._rest_of_string(text, place + 1)
            else:  # one of the stops
                break
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
